"""Trees that are known beforehand, filled with the best guesses of heads.

Which combinations of guesses to verify is fixed; the tokens are lists of best ones, so a
block is a tree of point masses. The heads behind it are a function (``Guess``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.decode import pending
from jspec.sampling import mask_padding
from jspec.tree import Topology
from jspec.types import Array, Block, Context, Drafter, DraftShape, Feedback

# (weights, k, state, path [B, R, k + 1]) -> logits [B, R, V'] of head k (from 0) after
# each of R paths of tokens that start at the root; [B, 1, V'] if the path is not read.
Guess = Callable[[Any, int, Any, Array], Array]


def check(
    weights: Any, count: int, vocab: Array, vocab_size: int, topology: Topology
) -> None:
    """Refuses a tree that heads with product ``vocab [V', M]`` cannot fill.

    Raises:
      ValueError: naming both sides.
    """
    if topology.depth > count:
        raise ValueError(
            f"the tree is {topology.depth} levels deep, but there are {count} heads, one "
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
    guesses = max(topology.rank) + 1
    if guesses > min(rows, vocab_size):
        raise ValueError(
            f"the tree takes the {guesses} best tokens of a head, but there are only "
            f"{min(rows, vocab_size)}; choose a narrower tree"
        )


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


@functools.cache
def tree_drafter(
    guess: Guess,
    topology: Topology,
    vocab_size: int,
    tap: int = -1,
    init: Callable = last_feature,
    update: Callable = accepted_feature,
) -> Drafter:
    """Fills a static tree level by level from lists of best tokens.

    A row whose prompt is a single token has no feature yet: its block is the root alone.

    Args:
      guess: logits of a head; its weights have a ``to_target``.
      topology: the tree; node by node, which of its parent's guesses stands there.
      vocab_size: the target's vocabulary; rows of a head beyond it are never drafted.
      tap: the target layer whose feature the heads read.
      init, update: as in ``Drafter``; by default the state is the last feature.
    """
    levels = _levels(topology)
    parent = np.asarray(topology.parent, np.int32)

    def propose(params, state, key, context: Context):
        del key
        token = pending(context)[:, None]
        for k, level in enumerate(levels):
            logits = guess(params, k, state, token[:, level.path])
            best = _best(logits, params.to_target, vocab_size, max(level.rank) + 1)
            best = jnp.broadcast_to(
                best, (*token.shape[:1], *level.path.shape[:1], best.shape[2])
            )
            token = jnp.concatenate([token, best[:, level.row, level.rank]], axis=1)
        root = np.arange(topology.nodes) == 0
        block = Block(
            token=token,
            parent=jnp.broadcast_to(parent, token.shape),
            live=(context.length > 1)[:, None] | root,
            vote=jnp.ones(token.shape, bool),
        )
        return block, state

    shape = DraftShape(topology.nodes, topology.depth, taps=(tap,))
    return Drafter(shape, init, propose, update)


class _Level(NamedTuple):
    """A level of a tree: ``path [R, d]`` nodes from the root to each of its R parents;
    per node the ``row`` of its parent among them and its ``rank``."""

    path: np.ndarray
    row: tuple[int, ...]
    rank: tuple[int, ...]


def _levels(topology: Topology) -> list[_Level]:
    paths: list[list[int]] = []
    for node, up in enumerate(topology.parent):
        paths.append([*(paths[up] if node else []), node])
    levels = []
    for depth in range(1, topology.depth + 1):
        nodes = [i for i, path in enumerate(paths) if len(path) == depth + 1]
        parents = sorted({topology.parent[i] for i in nodes})
        levels.append(
            _Level(
                path=np.asarray([paths[p] for p in parents]),
                row=tuple(parents.index(topology.parent[i]) for i in nodes),
                rank=tuple(topology.rank[i] for i in nodes),
            )
        )
    return levels


def _best(logits: Array, to_target: Array | None, vocab_size: int, count: int) -> Array:
    """Target ids ``[B, R, count]`` of the best entries of ``logits [B, R, V']``."""
    if to_target is None:
        logits = mask_padding(logits, vocab_size)
    ids = lax.top_k(logits, count)[1]
    return ids if to_target is None else to_target[ids]
