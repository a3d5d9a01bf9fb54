"""The XLA path of CPUs: attention over the part of the cache that holds live slots."""

from __future__ import annotations

import functools
import itertools

import jax.numpy as jnp
from jax import lax

from jspec.pallas import reference
from jspec.types import Array

_FEWEST = 128  # slots that are not worth a choice


def sizes(slots: int) -> list[int]:
    """The numbers of slots there are programs for: doubling, and all of them."""
    doubling = (_FEWEST << i for i in itertools.count())
    return [*itertools.takewhile(lambda size: size < slots, doubling), slots]


def block_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    length: Array,
    *block: Array,
    **options,
) -> Array:
    """``reference.block_attention`` over the fewest of ``sizes`` that hold every live slot.

    One program has a branch for each. Dead slots cost what live ones cost: products, and an
    exponential for every head and row. Shapes are those of ``jspec.pallas.block_attention``;
    ``block`` is ``k_block, v_block, mask``.
    """

    def over(size: int) -> Array:
        k, v = k_cache[..., :size], v_cache[:, :, :size]
        return reference.block_attention(q, k, v, length, *block, **options)

    among = sizes(k_cache.shape[-1])
    if len(among) == 1:
        return over(among[0])
    which = jnp.sum(jnp.max(length) > jnp.asarray(among[:-1]))
    return lax.switch(which, [functools.partial(over, size) for size in among])
