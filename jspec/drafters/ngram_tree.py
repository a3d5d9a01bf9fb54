"""A tree of what followed the current n-gram, wherever it occurred before.

Where prompt lookup copies one occurrence, this verifies several at once, as the n-gram
trie of SGLang does: all suffixes of the text that occur again are anchors, the longest
first, and the tree is filled by recency or by frequency. Nothing is built: the trie is
read off the text in every round, whose cost is linear in its length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jspec.drafters import paths
from jspec.drafters.occurrences import Found, occurrences
from jspec.state import pending
from jspec.types import Array, Context, Drafter, DraftShape

# (found, same [K, K, G]) -> value [K, G] of every candidate's tokens; see ``paths.best``.
Order = Callable[[Found, Array], Array]


def recency(found: Found, same: Array) -> Array:
    """Level by level; within a level the longest match first, then the latest."""
    count, size = found.paths.token.shape
    own = paths.owner(same)
    return 1.0 - (jnp.arange(size) * count + own) / (count * size)


def frequency(found: Found, same: Array) -> Array:
    """The share of all candidates that go on like this."""
    some = jnp.maximum(jnp.sum(found.match > 0), 1)
    return jnp.sum(same, 1) / some


@functools.cache
def ngram_tree(
    nodes: int = 8,
    depth: int = 5,
    longest: int = 5,
    shortest: int = 2,
    candidates: int = 8,
    order: Order = recency,
) -> Drafter:
    """Drafts a tree of what followed earlier occurrences of the current n-grams.

    Args:
      nodes: with the root.  depth: most tokens on a path.
      longest, shortest: tokens of an n-gram.
      candidates: occurrences considered, the longest n-grams first, then the latest.
      order: which nodes there are: ``recency`` or ``frequency``.

    Raises:
      ValueError: sizes below 1 (nodes: 2), or not ``shortest <= longest``.
    """
    if min(nodes - 1, depth, candidates) < 1 or not 1 <= shortest <= longest:
        raise ValueError(
            f"{nodes} nodes, depth {depth}, {candidates} candidates, n-grams of {shortest}"
            f" .. {longest}; need at least 2, 1, 1, and 1 <= shortest <= longest"
        )

    def one(tokens: Array, length: Array):
        found = occurrences(tokens, length, longest, candidates, depth)
        enough = found.match >= shortest
        live = found.paths.live & enough[:, None]
        found = Found(
            jnp.where(enough, found.match, 0), found.paths._replace(live=live)
        )
        same = paths.agree(found.paths)
        return paths.best(order(found, same), found.paths, paths.owner(same), nodes - 1)

    def propose(params, state, key, context: Context):
        del params, key
        below = jax.vmap(one)(context.tokens, context.length)
        return paths.block(pending(context), *below[:3]), state

    return Drafter(
        shape=DraftShape(nodes, depth, widths=(1,)),
        init=lambda params, context: (),
        propose=propose,
        update=lambda params, state, feedback: state,
    )
