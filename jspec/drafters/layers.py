"""Attention of a drafter's own layers, over a cache of their own.

A drafter's layers are those of some target family, so keys and values or latents are
cached as there; what differs is only hidden here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jspec.cache import KV, KVCache, LatentCache
from jspec.models import architecture, deepseek, rope, transformer
from jspec.models.config import Config
from jspec.types import Array

# (i, normalised input) -> output of the attention of layer i
Attention = Callable[[int, Array], Array]


def init_cache(config: Config, batch: int, slots: int, dtype) -> KVCache | LatentCache:
    """An empty cache for layers of this config."""
    return architecture.target(config).init_cache(batch, slots, dtype)


def attention(
    config: Config, layers, cache, mask: Array, position: Array, before=None
) -> tuple[Attention, Callable[[], Any]]:
    """Attention over the cache, over earlier rows and of the rows over one another.

    Args:
      config: of the layers.  layers: their weights.
      cache: from ``init_cache``.
      mask: ``[B, n, R + n]`` bool; row ``i`` sees these of the R earlier rows and of the
        ``n`` rows themselves, and all of the cache.
      position: ``[B, n]`` int32.
      before: what R earlier rows left, or None.

    Returns:
      The attention of every layer, to be called once each and in order, and a function
      that then gives what the ``n`` rows leave: the form that ``cache.append`` takes.
    """
    make = _keys_and_values if config.latent is None else _latents
    return make(config, layers, cache, mask, position, before)


def _keys_and_values(
    config: Config, layers, cache: KVCache, mask, position, before: KV | None
):
    turns = {r: rope.turns(r, config.head_dim, position) for r in set(config.ropes)}
    ks, vs = [], []

    def attend(i: int, h: Array) -> Array:
        a, k, v = transformer.attend(
            layers[i],
            h,
            (cache.k[i], cache.v[i], cache.length),
            mask,
            turns[config.ropes[i]],
            config=config,
            window=config.windows[i],
            before=None if before is None else (before.k[i], before.v[i]),
        )
        ks.append(k)
        vs.append(v)
        return a

    return attend, lambda: KV(tuple(ks), tuple(vs))


def _latents(config: Config, layers, cache: LatentCache, mask, position, before):
    turn = rope.turns(config.ropes[0], deepseek.latent_sizes(config).rope_dim, position)
    own = []

    def attend(i: int, h: Array) -> Array:
        a, c = deepseek.attend(
            layers[i],
            h,
            (cache.latent[i], cache.length),
            mask,
            turn,
            config=config,
            before=None if before is None else before[i],
        )
        own.append(c)
        return a

    return attend, lambda: tuple(own)
