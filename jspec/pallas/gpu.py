"""Block attention for Hopper GPUs (Mosaic GPU): split over the cache, merged by XLA.

The grid is (sequence, kv head, tile of 64 rows, share of the cache). Query heads of a kv
head and nodes are rows, 64 of them one ``wgmma``. A cell walks its share of the *whole*
live cache blocks, two copies (TMA) ahead of the products, and leaves a partial softmax.
Dead blocks are in nobody's share. What is left, the few slots of the last, partial block
and the block's own keys, is two small products that XLA does with masks, so that the
kernel needs none; all parts are merged by one softmax. Caches are bfloat16: a float32 product would be TF32.

Source of the split and the merge: flash-decoding (Dao et al., 2023). Needs JAX >= 0.11.2.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.pallas import tiles
from jspec.pallas.reference import MASKED
from jspec.types import Array

_ROWS = 64  # rows of one wgmma of a warpgroup
_LOG2_E = 1.4426950408889634


class Part(NamedTuple):
    """A softmax over some of the keys: float32.

    ``top [B, K, X]`` its largest score, ``total [B, K, X]`` the sum of
    ``exp(score - top)``, ``mixed [B, K, X, D]`` the values weighed by the same.
    """

    top: Array
    total: Array
    mixed: Array


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
    interpret: Any = False,
) -> Array:
    """See ``jspec.pallas.block_attention``. Dead slots may hold anything, NaN included.

    Args:
      window: must be None.
      interpret: ``plgpu.InterpretGPUParams()`` runs it on a CPU.
    """
    assert window is None, "jspec.pallas.obstacle refuses windows"
    nodes, heads = q.shape[1:3]
    kv_heads = k_cache.shape[1]
    group = heads // kv_heads
    q = rearrange(q * scale, "b n (k g) d -> b k (g n) d", k=kv_heads)
    q = q.astype(k_cache.dtype)
    blocks = length.astype(jnp.int32) // tiles.gpu_slots(q.shape[-1])
    parts = [
        *_whole(q, k_cache, v_cache, blocks, softcap, interpret),
        _rest(q, k_cache, v_cache, length, blocks, softcap),
        _own(q, k_block, v_block, jnp.tile(mask, (1, group, 1)), softcap),
    ]
    out = merge(parts).astype(v_block.dtype)
    return rearrange(out, "b k (g n) d -> b n (k g) d", n=nodes)


def merge(parts: list[Part]) -> Array:
    """One softmax ``[B, K, X, D]`` over the keys of all parts."""
    top = functools.reduce(jnp.maximum, [p.top for p in parts])
    shrink = [jnp.exp(p.top - top) for p in parts]
    total, mixed = jnp.zeros_like(top), jnp.zeros_like(parts[0].mixed)
    for s, part in zip(shrink, parts, strict=True):
        total += s * part.total
        mixed += s[..., None] * part.mixed
    return mixed / total[..., None]


def _rest(q, k_cache, v_cache, length, blocks, softcap) -> Part:
    """The slots of the last block of every sequence, if it is not whole."""
    slots, block = k_cache.shape[-1], tiles.gpu_slots(q.shape[-1])
    size, begin = min(block, slots), blocks * block
    start = jnp.minimum(begin, slots - size)
    k = jax.vmap(lambda c, s: lax.dynamic_slice_in_dim(c, s, size, 2))(k_cache, start)
    v = jax.vmap(lambda c, s: lax.dynamic_slice_in_dim(c, s, size, 1))(v_cache, start)
    slot = start[:, None] + jnp.arange(size)
    live = (slot >= begin[:, None]) & (slot < length[:, None])
    v = jnp.where(live[:, None, :, None], v, 0)  # 0 * NaN is NaN
    return _softmax(q, k, v, live[:, None, None], softcap)


def _own(q, k_block, v_block, mask, softcap) -> Part:
    k = rearrange(k_block, "b r k d -> b k d r")
    v = rearrange(v_block, "b r k d -> b k r d")
    return _softmax(q, k, v, mask[:, None], softcap)


def _softmax(q, k, v, visible, softcap) -> Part:
    """A part in plain XLA: ``k [B, K, D, Y]``, ``v [B, K, Y, D]``."""
    s = jnp.einsum("bkxd,bkdy->bkxy", q, k, preferred_element_type=jnp.float32)
    s = s if softcap is None else softcap * jnp.tanh(s / softcap)
    s = jnp.where(visible, s, MASKED)
    top = jnp.max(s, -1)
    e = jnp.where(visible, jnp.exp(s - top[..., None]), 0)
    mixed = jnp.einsum(
        "bkxy,bkyd->bkxd", e.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    return Part(top, jnp.sum(e, -1), mixed)


def _whole(q, k_cache, v_cache, blocks, softcap, interpret) -> list[Part]:
    """The whole live blocks, a part for every share."""
    batch, kv_heads, rows, dim = q.shape
    padded = -(-rows // _ROWS) * _ROWS
    q = jnp.pad(q, ((0, 0), (0, 0), (0, padded - rows), (0, 0)))
    size, f32 = tiles.gpu_slots(dim), jnp.float32
    row_tiles, most = padded // _ROWS, k_cache.shape[-1] // size
    if most == 0:
        return []
    shares = tiles.gpu_shares(batch * kv_heads * row_tiles, most)
    # One swizzle for all operands of a product: rows of queries, keys and values.
    swizzle = plgpu.find_swizzle(tiles.gpu_multiple(dim) * 16)
    results = (batch, kv_heads, shares, padded)
    make = plgpu.kernel(
        functools.partial(_kernel, shares=shares, softcap=softcap),
        out_type=(
            jax.ShapeDtypeStruct((*results, dim), f32),
            jax.ShapeDtypeStruct(results, f32),
            jax.ShapeDtypeStruct(results, f32),
        ),
        grid=(batch, kv_heads, row_tiles, shares),
        grid_names=("batch", "head", "tile", "share"),
        scratch_types=dict(
            q_tile=_smem((_ROWS, dim), q.dtype, swizzle),
            k_tiles=_smem((tiles.GPU_STAGES, dim, size), q.dtype, swizzle),
            v_tiles=_smem((tiles.GPU_STAGES, size, dim), q.dtype, swizzle),
            p_tile=_smem((_ROWS, size), q.dtype, swizzle),
            out_tile=_smem((_ROWS, dim), f32, 128),
            top_tile=plgpu.SMEM((_ROWS,), f32),
            total_tile=plgpu.SMEM((_ROWS,), f32),
            q_here=plgpu.Barrier(),
            k_here=plgpu.Barrier(num_barriers=tiles.GPU_STAGES),
            v_here=plgpu.Barrier(num_barriers=tiles.GPU_STAGES),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    mixed, top, total = make(blocks, q, k_cache, v_cache)
    return [
        Part(top[:, :, i, :rows], total[:, :, i, :rows], mixed[:, :, i, :rows])
        for i in range(shares)
    ]


def _smem(shape: tuple[int, ...], dtype, swizzle: int) -> Any:
    """Shared memory in the tiled and swizzled form that TMA and wgmma want."""
    tile = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tile, plgpu.SwizzleTransform(swizzle)))


def _kernel(
    blocks,
    q,
    k_cache,
    v_cache,
    mixed,
    top,
    total,
    *,
    q_tile,
    k_tiles,
    v_tiles,
    p_tile,
    out_tile,
    top_tile,
    total_tile,
    q_here,
    k_here,
    v_here,
    shares,
    softcap,
):
    b, head = lax.axis_index("batch"), lax.axis_index("head")
    tile, share = lax.axis_index("tile"), lax.axis_index("share")
    rows, dim = q_tile.shape
    stages, _, size = k_tiles.shape
    live = blocks[b]
    each = lax.div(live + shares - 1, jnp.int32(shares))
    first = share * each
    count = jnp.maximum(jnp.minimum(live - first, each), 0)

    def fetch(i, stage):
        at = pl.ds((first + i) * size, size)
        plgpu.copy_gmem_to_smem(
            k_cache.at[b, head, :, at], k_tiles.at[stage], k_here.at[stage]
        )
        plgpu.copy_gmem_to_smem(
            v_cache.at[b, head, at], v_tiles.at[stage], v_here.at[stage]
        )

    plgpu.copy_gmem_to_smem(q.at[b, head, pl.ds(tile * rows, rows)], q_tile, q_here)
    for i in range(stages):
        pl.when(i < count)(functools.partial(fetch, i, i))
    plgpu.barrier_wait(q_here)

    def per_row(value: float):
        return plgpu.layout_cast(
            jnp.full((rows,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1)
        )

    def step(i, carry):
        acc, m, l = carry
        stage = lax.rem(i, jnp.int32(stages))
        plgpu.barrier_wait(k_here.at[stage])

        def products(acc_ref):
            plgpu.wgmma(acc_ref, q_tile, k_tiles.at[stage])
            return acc_ref[...]

        s = pl.run_scoped(
            products, plgpu.WGMMAAccumulatorRef((rows, size), jnp.float32)
        )
        if softcap is not None:
            s = softcap * jnp.tanh(s / softcap)
        s = s * _LOG2_E  # the hardware's exponential is that of 2
        new = jnp.maximum(m, jnp.max(s, axis=1))
        shrink = jnp.exp2(m - new)
        e = jnp.exp2(s - lax.broadcast_in_dim(new, s.shape, [0]))
        l = l * shrink + jnp.sum(e, axis=1)
        p_tile[...] = e.astype(p_tile.dtype)
        plgpu.commit_smem()
        plgpu.barrier_wait(v_here.at[stage])

        def mix(acc_ref):
            plgpu.wgmma(acc_ref, p_tile, v_tiles.at[stage])
            return acc_ref[...]

        # Weights pass through shared memory, and sums are not kept in the accumulator:
        # the interpreter knows neither an operand nor a start value in registers.
        added = pl.run_scoped(mix, plgpu.WGMMAAccumulatorRef((rows, dim), jnp.float32))
        acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0]) + added
        pl.when(i + stages < count)(lambda: fetch(i + stages, stage))
        return acc, new, l

    start = plgpu.layout_cast(jnp.zeros((rows, dim), jnp.float32), plgpu.Layout.WGMMA)
    acc, m, l = lax.fori_loop(0, count, step, (start, per_row(MASKED), per_row(0.0)))
    out_tile[...] = acc
    top_tile[...] = m * (1 / _LOG2_E)
    total_tile[...] = l
    plgpu.commit_smem()
    here = pl.ds(tile * rows, rows)
    plgpu.copy_smem_to_gmem(out_tile, mixed.at[b, head, share, here])
    plgpu.copy_smem_to_gmem(top_tile, top.at[b, head, share, here])
    plgpu.copy_smem_to_gmem(total_tile, total.at[b, head, share, here])
    plgpu.wait_smem_to_gmem(0)
