"""Generated cases for the attention kernels: shapes, masks, lengths and garbage."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from jspec import tree
from jspec.pallas import reference
from jspec.pallas.tiles import Tile

BF16, F32 = jnp.bfloat16, jnp.float32
TOLERANCE = {BF16: 2e-2, F32: 1e-5}


@dataclasses.dataclass(frozen=True)
class Case:
    """One program: everything that is static."""

    batch: int
    nodes: int
    heads: int
    kv_heads: int
    dim: int
    slots: int
    dtype: type = F32
    tile: Tile | None = None
    window: int | None = None
    softcap: float | None = None

    def arrays(self, seed: int):
        rng = np.random.default_rng(seed)

        def normal(*shape):
            return jnp.asarray(rng.normal(size=shape), self.dtype)

        b, n, k, d, s = self.batch, self.nodes, self.kv_heads, self.dim, self.slots
        own = normal(b, n, k, d), normal(b, n, k, d)
        return normal(b, n, self.heads, d), normal(b, k, d, s), normal(b, k, s, d), own

    @property
    def options(self) -> dict:
        return dict(scale=self.dim**-0.5, window=self.window, softcap=self.softcap)


def lengths(case: Case, seed: int) -> list[np.ndarray]:
    """Nothing, everything, the edges of blocks and a few at random, ragged."""
    rng = np.random.default_rng(seed)
    step = case.tile.slots if case.tile else 64  # of a block
    edges = [e for e in (0, 1, step - 1, step, step + 1) if e <= case.slots]
    return [
        np.zeros(case.batch, np.int32),
        np.full(case.batch, case.slots, np.int32),
        np.resize(edges, case.batch).astype(np.int32),
        np.resize(edges[::-1], case.batch).astype(np.int32),
        rng.integers(0, case.slots + 1, case.batch, dtype=np.int32),
    ]


def masks(case: Case, seed: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    n, shape = case.nodes, (case.batch, case.nodes)
    parents = [[-1, *(int(rng.integers(0, i)) for i in range(1, n))] for _ in range(99)]
    columns = max(n // 3, 1)  # lookahead: short branches from the root, side by side
    window = [-1, *(max(i - columns, 0) for i in range(1, n))]
    found = {
        "chain": tree.ancestors(jnp.broadcast_to(jnp.arange(n) - 1, shape)),
        "tree": tree.ancestors(jnp.array(parents[: case.batch])),
        "lookahead": tree.ancestors(jnp.broadcast_to(jnp.array(window), shape)),
        "diffusion": jnp.ones((*shape, n), bool),
    }
    if case.window is not None and case.window < n:
        found.pop("diffusion")
    return found


def spoil(cache, length, axis: int, garbage: float):
    slot = jnp.arange(cache.shape[axis])
    live = slot < jnp.asarray(length)[:, None]
    live = live[:, None, None, :] if axis == 3 else live[:, None, :, None]
    return jnp.where(live, cache, jnp.asarray(garbage, cache.dtype))


def worst(case: Case, kernel, seed: int) -> tuple[float, int]:
    """The largest error over the largest value, and how many cases were compared.

    ``kernel`` takes arrays alone; it may meet anything in dead slots.
    """
    kernel = jax.jit(kernel)
    specification = jax.jit(
        lambda *arrays: reference.block_attention(*arrays, **case.options)
    )
    q, k, v, own = case.arrays(seed)
    error, count = 0.0, 0
    grid = itertools.product(lengths(case, seed), masks(case, seed).values())
    for (length, mask), garbage in zip(grid, itertools.cycle([np.nan, 3e38, -np.inf])):
        dirty = spoil(k, length, 3, garbage), spoil(v, length, 2, garbage)
        clean = spoil(k, length, 3, 0), spoil(v, length, 2, 0)
        got = np.asarray(kernel(q, *dirty, length, *own, mask), np.float64)
        want = np.asarray(specification(q, *clean, length, *own, mask), np.float64)
        assert np.isfinite(got).all()
        error = max(error, float(np.abs(got - want).max() / np.abs(want).max()))
        count += 1
    return error, count
