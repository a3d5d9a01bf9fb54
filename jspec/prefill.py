"""Filling a cache from prompts, at once or in chunks: the score and append of decoding."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jspec.types import Array, Target, chain

_WIDEST = 128  # rows beyond it gain little speed and cost memory
_AT_ONCE = 1024  # rows of a batch that are scored without a cache
_STEP = 32  # so few widths that their programs are soon compiled


class Filled(NamedTuple):
    """What scoring a prompt leaves.

    Attributes:
      cache: of all its tokens but the last one, which is pending.
      features: ``[B, T, F]`` tapped features of the same tokens, zero from the pending
        one on; None without taps.
    """

    cache: Any
    features: Array | None


def whole_for(tokens: int, batch: int) -> int | None:
    """The width of a block that holds prompts of ``tokens``; None if it is too wide."""
    width = -(-max(tokens - 1, 1) // _STEP) * _STEP
    return width if width * batch <= _AT_ONCE else None


def chunk_for(tokens: int) -> int:
    """Tokens to score at once, so that prompts of ``tokens`` fill their chunks well."""
    scored = max(tokens - 1, 1)
    chunks = -(-scored // _WIDEST)
    return -(-scored // (chunks * _STEP)) * _STEP


def fill_cache(
    model: Target,
    params: Any,
    tokens: Array,
    length: Array,
    *,
    slots: int,
    chunk: int = 64,
    taps: tuple[int, ...] = (),
    dtype=jnp.float32,
    begun: Filled | None = None,
) -> Filled:
    """Scores all committed tokens but the pending one.

    Args:
      model, params: who scores.
      tokens: ``[B, T]`` int32, left-aligned.
      length: ``[B]`` int32 committed tokens; the last of them stays out of the cache.
      slots: capacity of the returned cache.
      chunk: tokens scored at once.
      taps: as in ``Target.score``.
      dtype: of the cache.
      begun: goes on from here, with the same slots, taps and T. Its first
        ``cache.length`` tokens, as many in every row, are those of ``tokens``.
    """
    batch, width = tokens.shape
    pad = -width % chunk if begun is None else chunk
    padded = jnp.pad(tokens, ((0, 0), (0, pad)))
    path = jnp.broadcast_to(jnp.arange(chunk), (batch, chunk))
    # A chunk writes all its rows at `length`: room for one more, cropped afterwards.
    cache = model.init_cache(batch, slots + chunk, dtype)
    features = _no_features(model, params, cache, padded, taps)
    start: Any = 0
    if begun is not None:
        start = begun.cache.length[0]
        cache = jax.tree.map(_over, cache, begun.cache)
        if features is not None and begun.features is not None:
            known = jnp.arange(width)[:, None] < start
            features = _over(features, jnp.where(known, begun.features, 0))

    def score_chunk(i, carry):
        cache, features = carry
        at = start + i * chunk
        block = chain(
            lax.dynamic_slice_in_dim(padded, at, chunk, axis=1),
            live=at + jnp.arange(chunk) < length[:, None] - 1,
        )
        out = model.score(params, cache, block, taps=taps, rows="none")
        count = _after(jnp.clip(length - 1 - at, 0, chunk), out.kv)
        cache = cache.append(out.kv, path, count)
        if taps:
            new = jnp.where(block.live[..., None], out.features, 0)
            features = lax.dynamic_update_slice_in_dim(features, new, at, axis=1)
        return cache, features

    chunks = (jnp.max(length) - 1 - start + chunk - 1) // chunk
    cache, features = lax.fori_loop(0, chunks, score_chunk, (cache, features))
    if taps:
        features = features[:, :width]
    return Filled(cache.crop(slots), features)


def fill_at_once(
    model: Target,
    params: Any,
    tokens: Array,
    length: Array,
    *,
    slots: int,
    width: int,
    taps: tuple[int, ...] = (),
    dtype=jnp.float32,
) -> Filled:
    """``fill_cache`` of short prompts: one block over no cache, which then becomes it.

    Weights are read once, nothing attends to empty slots, and no larger cache is cropped.

    Args:
      width: at least ``max(length) - 1``, of the block.
      The others are those of ``fill_cache``.
    """
    batch, given = tokens.shape
    padded = jnp.pad(tokens, ((0, 0), (0, max(width - given, 0))))
    count = length - 1
    block = chain(padded[:, :width], live=jnp.arange(width) < count[:, None])
    nothing = model.init_cache(batch, 0, dtype)
    out = model.score(params, nothing, block, taps=taps, rows="none")
    kept = jnp.broadcast_to(jnp.arange(min(width, slots)), (batch, min(width, slots)))
    cache = model.init_cache(batch, slots, dtype).append(out.kv, kept, count)
    features = None
    if taps:
        live = jnp.where(block.live[..., None], out.features, 0)[:, :given]
        features = jnp.pad(live, ((0, 0), (0, given - live.shape[1]), (0, 0)))
    return Filled(cache, features)


def _over(large: Array, small: Array) -> Array:
    """``large`` with ``small`` in the corner where all indices are 0."""
    return lax.dynamic_update_slice(large, small, [0] * large.ndim)


def _after(count: Array, kv: Any) -> Array:
    """``count``, known to XLA only when the last of ``kv`` is (see ``cache``).

    The -1 is never taken; a 0 would let XLA see that counts are never negative.
    """
    some = jax.tree.leaves(kv)[-1].ravel()[:2]
    return jnp.where(jnp.argmax(some) >= 0, count, -1)


def _no_features(model: Target, params, cache, tokens: Array, taps):
    """Zeros in the shape of the features of ``tokens [B, T]``, or None."""
    if not taps:
        return None
    block = chain(tokens[:, :1])
    one = jax.eval_shape(lambda: model.score(params, cache, block, taps=taps)).features
    return jnp.zeros((*tokens.shape, one.shape[-1]), one.dtype)
