"""The XLA path of CPUs: attention over what can be seen, and not over what is masked."""

from __future__ import annotations

import functools
import itertools

import jax.numpy as jnp
from jax import lax

from jspec.pallas import reference
from jspec.types import Array

_FEWEST = 128  # slots that are not worth a choice
_ROWS = 96  # of a wide block that are worth products of their own
_PARTS = 5  # of a wide block; more save less than they cost


def sizes(slots: int) -> list[int]:
    """The numbers of slots there are programs for: doubling, and all of them."""
    doubling = (_FEWEST << i for i in itertools.count())
    return [*itertools.takewhile(lambda size: size < slots, doubling), slots]


def block_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    length: Array,
    k_block: Array,
    v_block: Array,
    mask: Array,
    *,
    window: int | None = None,
    ordered: bool = False,
    **options,
) -> Array:
    """``reference.block_attention`` over the fewest of ``sizes`` that hold every live slot.

    One program has a branch for each. Dead slots cost what live ones cost: products, and an
    exponential for every head and row. The same holds for the nodes after a row: an
    ``ordered`` block of many rows is cut, and every part sees the nodes up to its end.
    Arguments are those of ``jspec.pallas.block_attention``.
    """

    def over(size: int, rows: slice = slice(None), nodes: slice = slice(None)) -> Array:
        return reference.block_attention(
            q[:, rows],
            k_cache[..., :size],
            v_cache[:, :, :size],
            length,
            k_block[:, nodes],
            v_block[:, nodes],
            mask[:, rows, nodes],
            window=window,
            **options,
        )

    def of_parts(size: int) -> Array:
        count = max(min(q.shape[1] // _ROWS, _PARTS), 1)
        if count == 1 or not ordered or window is not None:
            return over(size)
        ends = [q.shape[1] * (i + 1) // count for i in range(count)]
        starts = [0, *ends[:-1]]
        parts = zip(starts, ends, strict=True)
        return jnp.concatenate([over(size, slice(a, b), slice(b)) for a, b in parts], 1)

    among = sizes(k_cache.shape[-1])
    if len(among) == 1:
        return of_parts(among[0])
    which = jnp.sum(jnp.max(length) > jnp.asarray(among[:-1]))
    return lax.switch(which, [functools.partial(of_parts, size) for size in among])
