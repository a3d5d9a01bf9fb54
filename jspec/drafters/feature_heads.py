"""Drafters whose heads, one a level, all read the same feature of the target.

The heads are a function (``Guess``); a grower decides which of their guesses are verified.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from jspec.drafters import growth
from jspec.drafters.growth import Grower
from jspec.drafters.recurrent import block
from jspec.sampling import mask_padding
from jspec.state import pending
from jspec.tree import Topology
from jspec.types import Array, Context, Drafter, Feedback

# (weights, k, state, path [B, R, k + 1]) -> logits [B, R, V'] of head k (from 0) after
# each of R paths of tokens that start at the root; [B, 1, V'] if the path is not read.
Guess = Callable[[Any, int, Any, Array], Array]


def check(
    weights: Any, count: int, vocab: Array, vocab_size: int, shape: Topology | Grower
) -> Grower:
    """What grows ``shape``; refuses one that heads ``vocab [V', M]`` cannot fill.

    Raises:
      ValueError: naming both sides.
    """
    if shape.depth > count:
        raise ValueError(
            f"the tree is {shape.depth} levels deep, but there are {count} heads, one "
            f"a level; choose a tree of at most {count} levels, or more heads"
        )
    to_target, rows = weights.to_target, vocab.shape[0]
    if to_target is not None and to_target.shape != (rows,):
        raise ValueError(
            f"to_target has shape {to_target.shape}, but the heads have {rows} rows; it "
            "needs one target id a row"
        )
    if to_target is not None:
        low, high = int(jnp.min(to_target)), int(jnp.max(to_target))
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"to_target holds ids from {low} to {high}, but the target has "
                f"{vocab_size} tokens"
            )
    if isinstance(shape, Grower):
        return shape
    guesses = max(shape.rank) + 1
    if guesses > min(rows, vocab_size):
        raise ValueError(
            f"the tree takes the {guesses} best tokens of a head, but there are only "
            f"{min(rows, vocab_size)}; choose a narrower tree"
        )
    return growth.ranked(shape)


def last_feature(params: Any, context: Context) -> Array:
    """The feature ``[B, M]`` of the token before the pending one, zero without any."""
    del params
    assert context.features is not None
    at = jnp.maximum(context.length - 2, 0)[:, None, None]
    return jnp.take_along_axis(context.features, at, axis=1)[:, 0]


def accepted_feature(params: Any, feature: Array, feedback: Feedback) -> Array:
    """The feature ``[B, M]`` of the last accepted node; rows that ended keep theirs."""
    del params
    assert feedback.features is not None
    n = feedback.verdict.n_accept[:, None]
    node = jnp.take_along_axis(feedback.verdict.path, jnp.maximum(n, 0), axis=1)
    at = jnp.maximum(node, 0)[:, :, None]
    new = jnp.take_along_axis(feedback.features, at, axis=1)[:, 0]
    return jnp.where(n >= 0, new, feature)


class _At(NamedTuple):
    """One level of a growing tree: target tokens ``path [B, n, d]`` from the root to every
    node, and the static ``head`` whose guesses follow them."""

    path: Array
    head: int


@functools.cache
def tree_drafter(
    guess: Guess,
    grower: Grower,
    vocab_size: int,
    tap: int = -1,
    init: Callable = last_feature,
    update: Callable = accepted_feature,
) -> Drafter:
    """A drafter from heads, one a level, and a way to grow blocks.

    A row whose prompt is a single token has no feature yet: its block is the root alone.

    Args:
      guess: logits of a head; its weights have a ``to_target``.
      grower: decides which nodes there are, as a rule ``growth.ranked``.
      vocab_size: the target's vocabulary; rows of a head beyond it are never drafted.
      tap: the target layer whose feature the heads read.
      init, update: as in ``Drafter``; by default the state is the last feature.
    """

    def propose(params, state, key, context: Context):
        to_target = params.to_target

        def logits(at: _At) -> Array:
            found = guess(params, at.head, state, at.path)
            return found if to_target is not None else mask_padding(found, vocab_size)

        def extend(at: _At, token: Array, row: Array):
            token = token if to_target is None else to_target[token]
            path = jnp.take_along_axis(at.path, row[..., None], axis=1)
            at = _At(jnp.concatenate([path, token[..., None]], -1), at.head + 1)
            return logits(at), at

        root = _At(pending(context)[:, None, None], 0)
        grown = grower.grow(extend, root, logits(root)[:, 0], key, context.sampling)
        return block(context, grown, context.length - 1, to_target, grower), state

    return Drafter(grower.shape((tap,)), init, propose, update)
