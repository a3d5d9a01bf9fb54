"""Block attention for TPUs (Mosaic): one pass over the live part of the cache.

The grid is (sequence, group of kv heads, cache block). A cache block's place follows from
the lengths, which are prefetched as scalars: steps after a sequence's last live block, and
sequences with none, name the block that already is on the chip, and the pipeline copies
nothing. The number of steps is that of the longest sequence, not that of the capacity.

Query heads of a kv head and nodes are rows of one product. The block's own keys start the
online softmax (Milakov and Gimelshein, arXiv 1805.02867; its tiling is FlashAttention's,
Dao et al., arXiv 2205.14135), so that prefix and block are merged without a second kernel.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jspec import tree
from jspec.pallas import tiles
from jspec.pallas.reference import MASKED
from jspec.pallas.tiles import Tile
from jspec.types import Array

_DEEPEST = 128  # nodes of a block at most, so no depth is greater
_ROWS = 16  # sublanes of a bfloat16 register tile
_SUBLANES = 8  # of a float32 one


class Plan(NamedTuple):
    """Where the cache blocks of every sequence lie; int32 ``[B]`` each.

    Attributes:
      first: the first cache block that a row can see.
      last: the last one; ``first - 1`` when there is none.
      owner: the sequence whose block is on the chip while this one has none to fetch.
    """

    first: Array
    last: Array
    owner: Array


def plan(length: Array, block: int, window: int | None = None) -> Plan:
    """The live cache blocks of ``block`` slots for prefixes of ``length [B]``."""
    first = jnp.zeros_like(length)
    if window is not None:
        # The root stands at `length` and sees the slots from `length - window + 1` on.
        first = jnp.maximum(length + 1 - window, 0) // block
    last = jnp.maximum(pl.cdiv(length, block) - 1, first - 1)
    some = last >= first
    index = jnp.arange(length.shape[0], dtype=jnp.int32)
    owner = jnp.maximum(lax.cummax(jnp.where(some, index, -1)), 0)
    return Plan(first, last, owner)


def cache_block(b, group, step, where: Plan, groups: int):
    """Sequence, group of heads and cache block that grid cell ``(b, group, step)`` reads."""
    some, owner = where.last[b] >= where.first[b], where.owner[b]
    shown = jnp.maximum(where.last[owner], 0)
    at = jnp.where(some, jnp.minimum(where.first[b] + step, shown), shown)
    return owner, jnp.where(some, group, groups - 1), at


def block_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    length: Array,
    k_block: Array,
    v_block: Array,
    mask: Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    tile: Tile | None = None,
    interpret: Any = False,
) -> Array:
    """See ``jspec.pallas.block_attention``. Dead slots may hold anything, NaN included.

    Args:
      tile: cache slots and kv heads of a grid step; by default ``tiles.tpu``'s choice.
      interpret: run without a TPU, as ``pallas_call`` takes it.
    """
    batch, nodes, heads, dim = q.shape
    kv_heads, slots = k_cache.shape[1], k_cache.shape[-1]
    group = heads // kv_heads
    size = k_cache.dtype.itemsize
    rows = _up(group * nodes, _ROWS)
    keys = _up(mask.shape[-1], _ROWS)
    tile = tile or tiles.tpu(slots, kv_heads, rows, keys, dim, size)
    where = plan(length.astype(jnp.int32), tile.slots, window)

    q = rearrange(q, "b n (k g) d -> b k (g n) d", k=kv_heads)
    q = _pad(q, rows, 2)
    k_own = _pad(rearrange(k_block, "b r k d -> b k r d"), keys, 2)
    v_own = _pad(rearrange(v_block, "b r k d -> b k r d"), keys, 2)
    seen, depth = mask, tree.depth(mask)
    if window is not None:
        seen = mask & (depth[:, :, None] - depth[:, None, :] < window)
    seen = _pad(seen.astype(jnp.int8), keys, 2)
    if nodes % _SUBLANES or rows != group * nodes:  # else repeated on the chip
        seen = _pad(jnp.tile(seen, (1, group, 1)), rows, 1)
    extra = []
    if window is not None:  # first visible slot of every row
        oldest = length[:, None] + depth - window + 1
        extra = [_pad(jnp.tile(oldest, (1, group))[..., None], rows, 1)]

    wide = jnp.promote_types(q.dtype, k_cache.dtype)
    out = pl.pallas_call(
        functools.partial(
            _kernel, tile=tile, scale=scale, softcap=softcap, window=window
        ),
        out_shape=jax.ShapeDtypeStruct((batch, kv_heads, rows, dim), v_block.dtype),
        grid_spec=_grid(seen.shape[1], q.shape, keys, tile, where, window, wide),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=tiles.VMEM_LIMIT,
        ),
        cost_estimate=_cost(q, k_cache, k_own, seen, window, tile),
        interpret=interpret,
        name="block_attention",
    )(length.astype(jnp.int32), *where, q, k_own, v_own, seen, *extra, k_cache, v_cache)
    out = out[:, :, : group * nodes]
    return rearrange(out, "b k (g n) d -> b n (k g) d", n=nodes)


def _grid(masks, queries, keys, tile: Tile, where: Plan, window, wide):
    """Steps, and which part of every operand a step reads."""
    batch, kv_heads, rows, dim = queries
    groups = kv_heads // tile.heads
    steps = jnp.maximum(jnp.max(where.last - where.first) + 1, 1)

    def own(size, width):  # the part of a group of heads, the same in all its steps
        return pl.BlockSpec(
            (1, tile.heads, size, width), lambda b, g, s, *_: (b, g, 0, 0)
        )

    def per_row(size, width):
        return pl.BlockSpec((1, size, width), lambda b, g, s, *_: (b, 0, 0))

    def keys_at(b, g, s, length, *where):
        b, g, at = cache_block(b, g, s, Plan(*where), groups)
        return b, g, 0, at

    def values_at(b, g, s, length, *where):
        b, g, at = cache_block(b, g, s, Plan(*where), groups)
        return b, g, at, 0

    return pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1 + len(where),
        grid=(batch, groups, steps),
        in_specs=[
            own(rows, dim),
            own(keys, dim),
            own(keys, dim),
            per_row(masks, keys),
            *([] if window is None else [per_row(rows, 1)]),
            pl.BlockSpec((1, tile.heads, dim, tile.slots), keys_at),
            pl.BlockSpec((1, tile.heads, tile.slots, dim), values_at),
        ],
        out_specs=own(rows, dim),
        scratch_shapes=[
            pltpu.VMEM((tile.heads, rows, dim), wide),
            pltpu.VMEM((tile.heads, rows, 1), jnp.float32),
            pltpu.VMEM((tile.heads, rows, 1), jnp.float32),
            pltpu.VMEM((tile.heads, rows, dim), jnp.float32),
        ],
    )


def _kernel(
    length,
    first,
    last,
    owner,
    queries,
    k_own,
    v_own,
    seen,
    *refs,
    tile,
    scale,
    softcap,
    window,
):
    *oldest, k_cache, v_cache, out, q, top, total, mixed = refs
    b, step = pl.program_id(0), pl.program_id(2)
    start = (first[b] + step) * tile.slots
    rows = q.shape[1]

    @pl.when(step == 0)
    def _():
        q[...] = (queries[0] * scale).astype(q.dtype)
        s = _scores(q[...], k_own[0], 2, softcap)
        visible = seen[0].astype(jnp.int32)
        if visible.shape[0] != rows:
            visible = jnp.concatenate([visible] * (rows // visible.shape[0]))
        s = jnp.where((visible != 0)[None], s, MASKED)
        m = jnp.max(s, -1, keepdims=True)
        e = jnp.exp(s - m)
        top[...], total[...] = m, jnp.sum(e, -1, keepdims=True)
        mixed[...] = _mix(e, v_own[0])

    def fold(whole: bool):
        v = v_cache[0]
        s = _scores(q[...], k_cache[0], 1, softcap)
        if not whole:
            slot = start + lax.broadcasted_iota(jnp.int32, (rows, tile.slots), 1)
            visible = slot < length[b]
            if window is not None:
                visible &= slot >= oldest[0][0]
            s = jnp.where(visible[None], s, MASKED)
            # A weight of zero does not silence a NaN.
            slot = start + lax.broadcasted_iota(jnp.int32, v.shape, 1)
            v = jnp.where(slot < length[b], v, jnp.zeros_like(v))
        m = jnp.maximum(top[...], jnp.max(s, -1, keepdims=True))
        shrink, e = jnp.exp(top[...] - m), jnp.exp(s - m)
        top[...] = m
        total[...] = shrink * total[...] + jnp.sum(e, -1, keepdims=True)
        mixed[...] = shrink * mixed[...] + _mix(e, v)

    is_live, is_whole = start < length[b], start + tile.slots <= length[b]
    if window is not None:  # the deepest row's view begins last
        is_whole &= start >= length[b] + _DEEPEST - window
    pl.when(is_live & is_whole)(lambda: fold(whole=True))
    pl.when(is_live & ~is_whole)(lambda: fold(whole=False))

    @pl.when(step == pl.num_programs(2) - 1)
    def _():
        out[0] = (mixed[...] / total[...]).astype(out.dtype)


def _scores(q, k, axis: int, softcap: float | None):
    """``[heads, rows, D]`` by keys whose axis ``axis`` is D, in float32."""
    s = _product(q, k.astype(q.dtype), axis)
    return s if softcap is None else softcap * jnp.tanh(s / softcap)


def _mix(e, v):
    return _product(e.astype(v.dtype), v, 1)


def _product(x, y, axis: int):
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(
        x,
        y,
        (((2,), (axis,)), ((0,), (0,))),
        precision=exact,
        preferred_element_type=jnp.float32,
    )


def _cost(q, k_cache, k_own, seen, window, tile: Tile) -> pl.CostEstimate:
    """What XLA is told: the work of a full cache, for lengths are not known to it.

    Bytes are what the pipeline copies, which ``traffic`` counts for given lengths.
    """
    batch, _, rows, dim = q.shape
    slots = k_cache.shape[-1]
    read = slots if window is None else min(slots, window + tile.slots)
    keys = read + k_own.shape[2]
    pairs = batch * k_own.shape[1] * rows * keys
    size = k_cache.dtype.itemsize
    moved = 2 * batch * k_own.shape[1] * dim * keys * size
    moved += q.size * (q.dtype.itemsize + k_own.dtype.itemsize) + seen.size
    return pl.CostEstimate(
        flops=4 * pairs * dim, transcendentals=pairs, bytes_accessed=moved
    )


def traffic(
    length: Array,
    *,
    slots: int,
    kv_heads: int,
    dim: int,
    size: int,
    tile: Tile,
    window: int | None = None,
) -> int:
    """Bytes of keys and values that the pipeline copies for prefixes of ``length [B]``.

    The grid is walked with the kernel's own ``cache_block``; a copy is made where the
    block differs from that of the step before, which is Pallas' rule.

    Args:
      length: concrete.  slots: capacity of the cache.  size: bytes of a cached number.
    """
    where = plan(jnp.asarray(length, jnp.int32), tile.slots, window)
    groups = kv_heads // tile.heads
    steps = max(int(jnp.max(where.last - where.first)) + 1, 1)
    cells = jnp.stack(
        [x.ravel() for x in jnp.indices((len(where.first), groups, steps))]
    )
    at = jax.vmap(
        lambda c: jnp.stack(cache_block(c[0], c[1], c[2], where, groups)), 1, 1
    )(cells)
    fresh = jnp.concatenate([jnp.ones(1, bool), jnp.any(at[:, 1:] != at[:, :-1], 0)])
    # The last block may reach beyond the cache; only what exists is copied.
    width = jnp.minimum(slots - at[2] * tile.slots, tile.slots)
    return int(jnp.sum(fresh * width)) * 2 * tile.heads * dim * size


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _pad(x: Array, size: int, axis: int) -> Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)
