"""Prompt lookup: draft what followed the last occurrence of the current n-gram.

Saxena, "Prompt Lookup Decoding" (2023). The tokens are looked up, not drawn: a point
mass. The search is a handful of vectorised passes over the token buffer, O(length) a
round, on device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax.numpy as jnp

from jspec.types import Array, Context, Drafter, DraftShape, chain

# (match [B, T] of n-gram ends, length [B], gamma) -> position [B] of the match to use,
# or -1. A match at ``i`` means that tokens ``.. i`` end with the current n-gram.
Pick = Callable[[Array, Array, int], Array]


def latest(match: Array, length: Array, gamma: int) -> Array:
    """The most recent match."""
    del length, gamma
    return jnp.max(jnp.where(match, jnp.arange(match.shape[1]), -1), -1)


def first(match: Array, length: Array, gamma: int) -> Array:
    """The leftmost match, as in transformers' ``PromptLookupCandidateGenerator``."""
    del length, gamma
    width = match.shape[1]
    at = jnp.min(jnp.where(match, jnp.arange(width), width), -1)
    return jnp.where(at < width, at, -1)


def first_whole(match: Array, length: Array, gamma: int) -> Array:
    """The leftmost match whose whole continuation exists, as in the original code."""
    whole = jnp.arange(match.shape[1]) + gamma < length[:, None]
    return first(match & whole, length, gamma)


@functools.cache
def ngram(
    gamma: int = 7, longest: int = 5, shortest: int = 3, pick: Pick = latest
) -> Drafter:
    """Drafts by prompt lookup.

    Looks for the last ``n`` tokens earlier in the text, for ``n = longest .. shortest``;
    the longest n-gram that occurs wins and up to ``gamma`` tokens after the chosen
    occurrence are proposed. No occurrence, no draft: the round costs a plain step, while
    a rejected draft costs a whole verification. That is why single tokens are not looked
    up unless ``shortest`` says so, as it should where a block costs little more than one
    token (accelerators, bfloat16 on a CPU with AMX).

    ``gamma=10, longest=2, shortest=1, pick=first`` drafts what transformers drafts,
    ``gamma=10, longest=3, shortest=1, pick=first_whole`` what the original code drafts.

    Args:
      gamma: most tokens to draft.
      longest: longest n-gram to look for, in tokens.
      shortest: shortest.
      pick: which occurrence to use: ``latest``, ``first`` or ``first_whole``.

    Raises:
      ValueError: unless ``gamma >= 1`` and ``1 <= shortest <= longest``.
    """
    if gamma < 1:
        raise ValueError(f"gamma is {gamma}; a drafter needs at least 1")
    if not 1 <= shortest <= longest:
        raise ValueError(
            f"n-grams of {shortest} .. {longest} tokens; need 1 <= shortest <= longest"
        )

    def propose(params, state, key, context: Context):
        del params, key
        at = _occurrence(context, longest, shortest, gamma, pick)
        step = jnp.arange(gamma + 1)
        # Node 0 is the root; draft d follows the occurrence by d.
        source = jnp.where(step == 0, context.length[:, None] - 1, at[:, None] + step)
        live = (step == 0) | ((at >= 0)[:, None] & (source < context.length[:, None]))
        token = jnp.take_along_axis(context.tokens, jnp.where(live, source, 0), axis=1)
        return chain(token, live), state

    return Drafter(
        shape=DraftShape(nodes=gamma + 1, depth=gamma, widths=(1,)),
        init=lambda params, context: (),
        propose=propose,
        update=lambda params, state, feedback: state,
    )


def _occurrence(
    context: Context, longest: int, shortest: int, gamma: int, pick: Pick
) -> Array:
    """Where the longest recurring n-gram ends, ``[B]``, -1 if nowhere."""
    tokens, length = context.tokens, context.length
    position = jnp.arange(tokens.shape[1])
    match = position < length[:, None] - 1  # the current n-gram itself does not count
    best = jnp.full(length.shape, -1)
    for n in range(1, longest + 1):
        back = n - 1  # compare the token `back` places before every end
        tail = jnp.take_along_axis(
            tokens, jnp.maximum(length - 1 - back, 0)[:, None], axis=1
        )
        shifted = jnp.roll(tokens, back, axis=1)
        match &= (shifted == tail) & (position >= back)
        match &= (length > back)[:, None]
        if n >= shortest:
            at = pick(match, length, gamma)
            best = jnp.where(at >= 0, at, best)
    return best
