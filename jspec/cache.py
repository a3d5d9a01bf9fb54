"""The key/value cache: allocate, append an accepted path; nothing else writes it.

A forward only ever reads the cache. It returns the keys and values of its block beside
the logits, and ``append`` stores the rows of the accepted path. Rejected rows were never
stored, so rolling back is simply the slice that is kept.

Layout (private to this file, the attention kernels and the models that call them): per
layer, keys ``[B, K, D, S]`` and values ``[B, K, S, D]``, or one array ``[B, 1, S, R]`` of
latents that are both. Layers are a tuple, not an axis: slicing one layer out of a
stacked array copies it.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import struct
from jax import lax

from jspec.types import Array


class KV(NamedTuple):
    """A block's own keys and values, one ``[B, N, K, D]`` array per layer."""

    k: tuple[Array, ...]
    v: tuple[Array, ...]


@struct.dataclass
class KVCache:
    """Keys and values of the committed tokens but the pending one.

    Attributes:
      k: per layer ``[B, K, D, S]``.
      v: per layer ``[B, K, S, D]``.
      length: ``[B]`` int32; slots at ``>= length`` mean nothing.
    """

    k: tuple[Array, ...]
    v: tuple[Array, ...]
    length: Array

    @property
    def slots(self) -> int:
        return self.k[0].shape[-1]

    def append(self, kv: KV, path: Array, count: Array) -> KVCache:
        """Stores the first ``count [B]`` nodes of ``path [B, P]`` (ids, -1 = none).

        All P rows are written at ``length``, so the caller leaves room for them:
        ``length + P <= slots``. (``dynamic_update_slice`` clamps silently, which would
        shift the write onto live rows.) Rows after ``count`` are dead.
        """
        node, start = jnp.maximum(path, 0), _start(self.length, count)
        k = tuple(_put(c, b, node, start, 3) for c, b in zip(self.k, kv.k, strict=True))
        v = tuple(_put(c, b, node, start, 2) for c, b in zip(self.v, kv.v, strict=True))
        return dataclasses.replace(self, k=k, v=v, length=self.length + count)

    def crop(self, slots: int) -> KVCache:
        """The same cache with fewer slots; ``length`` must fit."""
        return dataclasses.replace(
            self,
            k=tuple(c[..., :slots] for c in self.k),
            v=tuple(c[:, :, :slots] for c in self.v),
        )

    def rewind(self, length: Array) -> KVCache:
        """The cache of the first ``length [B]`` tokens (at most the present length)."""
        return dataclasses.replace(self, length=length)

    def first(self, layers: int) -> KVCache:
        """The cache of the first ``layers`` layers; arrays are shared."""
        return dataclasses.replace(self, k=self.k[:layers], v=self.v[:layers])


def init(
    layers: int, batch: int, kv_heads: int, head_dim: int, slots: int, dtype
) -> KVCache:
    """An empty cache with room for ``slots`` tokens a sequence, slack included."""
    # Zeros, not empty: a dead value row meets an attention weight of 0, and 0 * NaN
    # is NaN.
    return KVCache(
        k=tuple(
            jnp.zeros((batch, kv_heads, head_dim, slots), dtype) for _ in range(layers)
        ),
        v=tuple(
            jnp.zeros((batch, kv_heads, slots, head_dim), dtype) for _ in range(layers)
        ),
        length=jnp.zeros(batch, jnp.int32),
    )


@struct.dataclass
class LatentCache:
    """The latents of the committed tokens but the pending one; stands in for a KVCache.

    Attributes:
      latent: per layer ``[B, 1, S, R]``, one vector a token for all heads.
      length: ``[B]`` int32; slots at ``>= length`` mean nothing.
    """

    latent: tuple[Array, ...]
    length: Array

    @property
    def slots(self) -> int:
        return self.latent[0].shape[2]

    def append(self, kv: tuple[Array, ...], path: Array, count: Array) -> LatentCache:
        """As ``KVCache.append``; ``kv`` holds one ``[B, N, 1, R]`` array per layer."""
        node, start = jnp.maximum(path, 0), _start(self.length, count)
        latent = tuple(
            _put(c, b, node, start, 2) for c, b in zip(self.latent, kv, strict=True)
        )
        return dataclasses.replace(self, latent=latent, length=self.length + count)

    def crop(self, slots: int) -> LatentCache:
        """The same cache with fewer slots; ``length`` must fit."""
        return dataclasses.replace(
            self, latent=tuple(c[:, :, :slots] for c in self.latent)
        )

    def rewind(self, length: Array) -> LatentCache:
        """The cache of the first ``length [B]`` tokens (at most the present length)."""
        return dataclasses.replace(self, length=length)

    def first(self, layers: int) -> LatentCache:
        """The cache of the first ``layers`` layers; arrays are shared."""
        return dataclasses.replace(self, latent=self.latent[:layers])


def init_latent(layers: int, batch: int, dim: int, slots: int, dtype) -> LatentCache:
    """An empty cache of vectors of size ``dim``; ``slots`` as in ``init``."""
    return LatentCache(
        latent=tuple(jnp.zeros((batch, 1, slots, dim), dtype) for _ in range(layers)),
        length=jnp.zeros(batch, jnp.int32),
    )


def _start(length: Array, count: Array) -> Array:
    """``length``, known to XLA only when ``count`` (never negative) is.

    In a loop XLA writes a cache in place only if the write provably follows all reads,
    and copies it otherwise, twice a round. ``count`` follows from what was read.
    """
    return jnp.where(count >= 0, length, 0)


def _put(cache: Array, block: Array, node: Array, start: Array, axis: int) -> Array:
    """Writes rows ``node [B, P]`` of ``block [B, N, K, D]`` at slot ``start [B]``."""
    if block.shape[1] == 1:
        rows = block
    else:
        rows = jnp.take_along_axis(block, node[:, :, None, None], axis=1)
    form = "b p k d -> b k d p" if axis == 3 else "b p k d -> b k p d"
    rows = rearrange(rows, form).astype(cache.dtype)

    def put_one(b, out):
        one = lax.dynamic_slice_in_dim(rows, b, 1)
        at = [b, 0, 0, 0]
        at[axis] = start[b]
        return lax.dynamic_update_slice(out, one, at)

    # A loop over sequences updates in place; a scatter would copy the cache.
    batch = cache.shape[0]
    if batch == 1:
        return put_one(0, cache)
    return jax.lax.fori_loop(0, batch, put_one, cache)
