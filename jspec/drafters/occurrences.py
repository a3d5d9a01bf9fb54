"""Where the end of a text occurs earlier in it, and what followed there."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jspec.drafters.paths import Paths, leading
from jspec.types import Array

_EXACT = 1 << 24  # integers that float32 holds


class Found(NamedTuple):
    """Candidates of one sequence, the longest match first, of equal ones the latest.

    ``match [K]`` int32, tokens in which candidate and end of the text agree, 0 for none;
    ``paths``, what followed.
    """

    match: Array
    paths: Paths


def occurrences(
    tokens: Array, length: Array, longest: int, count: int, size: int
) -> Found:
    """The ``count`` best earlier occurrences of the end of one text.

    A handful of passes over the text for every token of ``longest``: no index is kept, so
    there is nothing to build, to roll back or to hold a stale copy of the text.

    Args:
      tokens: ``[T]`` int32.  length: scalar, committed tokens.
      longest: most tokens to compare.
      count: K.  size: G, most tokens that are taken from each.

    Raises:
      ValueError: if ``longest * T`` is more than a float32 can count.
    """
    width = tokens.shape[0]
    if (longest + 1) * width >= _EXACT:
        raise ValueError(
            f"matches of {longest} tokens in a context of {width}; their product must "
            f"stay below {_EXACT}: lower longest"
        )
    position = jnp.arange(width)
    same = position < length - 1  # the end itself does not count
    match = jnp.zeros(width, jnp.int32)
    for back in range(longest):
        tail = tokens[jnp.maximum(length - 1 - back, 0)]
        same &= (jnp.roll(tokens, back) == tail) & (position >= back)
        match += same
    # top_k of float32 is a selection on every platform, of integers a sort on some.
    rank = jnp.where(match > 0, match * width + position, -1).astype(jnp.float32)
    rank = jnp.pad(rank, (0, max(0, count - width)), constant_values=-1)
    best, at = lax.top_k(rank, count)
    at = jnp.where(best >= 0, at, -1)
    return Found(
        jnp.where(best >= 0, match[jnp.maximum(at, 0)], 0),
        follow(tokens, length, at, size),
    )


def follow(tokens: Array, length: Array, after: Array, size: int) -> Paths:
    """The next ``size`` tokens of text ``[T]`` after positions ``after [K]``, -1 = none.

    A negative id ends what follows, as does the end of the text.
    """
    at = after[:, None] + 1 + jnp.arange(size)
    live = (after >= 0)[:, None] & (at < length)
    token = tokens[jnp.where(live, at, 0)]
    live &= token >= 0
    return Paths(token, leading(live))
