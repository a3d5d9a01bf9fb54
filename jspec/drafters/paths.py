"""Candidate continuations as one tree: equal beginnings share their nodes.

Every function is for ONE sequence and K candidates of at most G tokens each, the more
relevant ones first. Rules try siblings by token, so two siblings must not have the same
one: of candidates that agree in their first tokens the first owns the common nodes.
"""

from __future__ import annotations

import itertools
import operator
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jspec.types import Array, Block


class Paths(NamedTuple):
    """Continuations: ``token [K, G]`` int32, ``live [K, G]``, which ends but once."""

    token: Array
    live: Array


def agree(paths: Paths) -> Array:
    """``[K, K, G]``: are candidates j and k live and equal up to and with token d?"""
    same = paths.token[:, None] == paths.token
    return leading(same & paths.live[:, None] & paths.live)


def leading(mask: Array) -> Array:
    """Ends every row of ``mask [..., G]`` at its first False.

    One fused pass, where a cumulative product would be many.
    """
    return jnp.stack(
        list(itertools.accumulate(jnp.moveaxis(mask, -1, 0), operator.and_)), -1
    )


def owner(same: Array) -> Array:
    """``[K, G]``: the first candidate with the same beginning; ``same`` from ``agree``."""
    return jnp.argmax(same, 1).astype(jnp.int32)


def whole(paths: Paths) -> tuple[Array, Array, Array]:
    """All nodes, candidate by candidate: ``(token, parent, live)``, each ``[K * G]``.

    Node ``1 + k G + d`` is token d of candidate k, and 0 the root. A node that an earlier
    candidate owns is dead.
    """
    count, size = paths.token.shape
    own = owner(agree(paths))
    live = paths.live & (own == jnp.arange(count)[:, None])
    node = 1 + own * size + jnp.arange(size)
    parent = jnp.pad(node[:, :-1], ((0, 0), (1, 0)))
    return paths.token.ravel(), jnp.where(live, parent, 0).ravel(), live.ravel()


class Nodes(NamedTuple):
    """Nodes below a root, ``[N - 1]`` each; ``value`` falls."""

    token: Array
    parent: Array
    live: Array
    value: Array


def best(value: Array, paths: Paths, own: Array, nodes: int) -> Nodes:
    """The ``nodes`` nodes of largest value.

    Args:
      value: ``[K, G]``, never larger than that of the node before on its path; a node
        with a value of 0 or less is left out.
      paths: the candidates.  own: from ``owner``.
      nodes: without the root.
    """
    count, size = value.shape
    mine = own == jnp.arange(count)[:, None]
    value = jnp.where(mine & paths.live, value, 0)
    # Level by level, for top_k gives equal values in order: a parent before its children.
    flat = value.T.ravel()
    flat = jnp.pad(flat, (0, max(0, nodes - flat.size)))
    top, chosen = lax.top_k(flat, nodes)
    level, row = chosen // count, chosen % count
    up = own[row, jnp.maximum(level - 1, 0)] + (level - 1) * count
    parent = 1 + jnp.argmax(chosen == up[:, None], -1)
    live = top > 0
    parent = jnp.where(live & (level > 0), parent, 0).astype(jnp.int32)
    return Nodes(paths.token[row, jnp.minimum(level, size - 1)], parent, live, top)


def block(root: Array, token: Array, parent: Array, live: Array) -> Block:
    """A batch's block of ``root [B]`` and nodes ``[B, N - 1]`` below it; all may vote."""
    root = root[:, None]
    token = jnp.concatenate([root, jnp.where(live, token, 0)], 1).astype(jnp.int32)
    return Block(
        token=token,
        parent=jnp.concatenate([jnp.full_like(root, -1), parent], 1).astype(jnp.int32),
        live=jnp.concatenate([jnp.ones_like(root, bool), live], 1),
        vote=jnp.ones(token.shape, bool),
    )
