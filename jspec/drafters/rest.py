"""REST: drafts from a store of other texts.

He et al. 2311.08252. The longest n-gram at the end of the text that the store holds at all
decides; of what followed its occurrences there, the most frequent beginnings are the tree.
Judged by one sample a node (``verify.walk``), not one a path, which keeps the law.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jspec.drafters import paths, store
from jspec.state import pending
from jspec.types import Array, Context, Drafter, DraftShape


@functools.cache
def rest(
    nodes: int = 16,
    depth: int = 6,
    longest: int = 16,
    shortest: int = 2,
    candidates: int = 32,
) -> Drafter:
    """Drafts the most frequent continuations in a store; its params are a ``Store``.

    Args:
      nodes: with the root (the original takes 64, more than a small machine can use).
      depth: most tokens on a path (original: 10).
      longest, shortest: tokens of the n-gram (16, 2).
      candidates: occurrences that are counted, an even sample of all (5,000).

    Raises:
      ValueError: sizes below 1 (nodes: 2), or not ``shortest <= longest``.
    """
    if min(nodes - 1, depth, candidates) < 1 or not 1 <= shortest <= longest:
        raise ValueError(
            f"{nodes} nodes, depth {depth}, {candidates} candidates, n-grams of {shortest}"
            f" .. {longest}; need at least 2, 1, 1, and 1 <= shortest <= longest"
        )

    def one(params: store.Store, tokens: Array, length: Array):
        size = jnp.arange(1, longest + 1)
        hits = store.search(params, tokens, length, longest, candidates, depth)
        usable = (hits.count > 0) & (size >= shortest)
        at = jnp.max(jnp.where(usable, size, 0)) - 1
        found = jax.tree.map(lambda x: x[jnp.maximum(at, 0)], hits.paths)
        found = found._replace(live=found.live & (at >= 0))
        same = paths.agree(found)
        count = jnp.sum(same, 1)
        return paths.best(count, found, paths.owner(same), nodes - 1)

    def propose(params, state, key, context: Context):
        del key
        below = jax.vmap(functools.partial(one, params))(context.tokens, context.length)
        return paths.block(pending(context), *below[:3]), state

    return Drafter(
        shape=DraftShape(nodes, depth, widths=(1,)),
        init=lambda params, context: (),
        propose=propose,
        update=lambda params, state, feedback: state,
    )
