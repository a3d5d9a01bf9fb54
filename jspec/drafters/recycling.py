"""Token Recycling: the candidates a target rejected are the drafts of later rounds.

Luo et al. 2408.08696. A table holds, for every token, the tokens that the target held
likeliest after it when it last met it. A static tree is read off the table; every row that
the target scores, kept or not, renews the table.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jspec import sampling as smp
from jspec.drafters import paths
from jspec.state import pending
from jspec.tree import Topology
from jspec.types import Array, Context, Drafter, DraftShape, Feedback


@functools.cache
def recycling(vocab_size: int, topology: Topology) -> Drafter:
    """Drafts a static tree from what the target said last after each token.

    The table is ``[V, K]`` a sequence, K being the most guesses that the tree asks for
    after one token; unknown successors are dead nodes. Its params are None, or such a table
    to begin with (``[V, K]`` int32, -1 where nothing is known): one from earlier texts
    saves a sequence from starting with nothing but its prompt's bigrams.

    Args:
      vocab_size: V, of the target.
      topology: node i is its parent's guess of rank ``topology.rank[i]``.
    """
    width = max(topology.rank) + 1

    def init(params, context: Context) -> Array:
        batch = context.length.shape[0]
        if params is None:
            start = jnp.full((vocab_size, width), -1, jnp.int32)
        else:
            start = jnp.asarray(params)[:, :width]
        table = jnp.broadcast_to(start, (batch, vocab_size, width))
        return jax.vmap(_learn_bigrams)(table, context.tokens, context.length)

    def propose(params, table: Array, key, context: Context):
        del params, key
        root = pending(context)
        nodes = jax.vmap(functools.partial(_read, topology))(table, root)
        return paths.block(root, *nodes), table

    def update(params, table: Array, feedback: Feedback) -> Array:
        del params
        said = _leaders(feedback.logits, width)
        block = feedback.block
        live = block.live & (feedback.verdict.n_accept >= 0)[:, None]
        return jax.vmap(_learn)(table, block.token, live, said)

    # A root without a known successor is a plain step.
    shape = DraftShape(topology.nodes, topology.depth, widths=(1,))
    return Drafter(shape, init, propose, update)


def _read(topology: Topology, table: Array, root: Array):
    """The tree below ``root``: ``(token, parent, live)`` of one sequence, ``[N - 1]``."""
    token = [root]
    for up, rank in zip(topology.parent[1:], topology.rank[1:], strict=True):
        guess = table[jnp.maximum(token[up], 0), rank]
        token.append(jnp.where(token[up] >= 0, guess, -1))
    token = jnp.stack(token[1:])
    return token, jnp.asarray(topology.parent[1:]), token >= 0


def _leaders(logits: Array, count: int) -> Array:
    """The ``count`` best tokens of every row, ``[B, N, count]``.

    One after the other: a top_k over the vocabulary costs a CPU more than a few maxima.
    """
    found, ids = [], jnp.arange(logits.shape[-1])
    for _ in range(count):
        found.append(smp.argmax(logits))
        logits = jnp.where(ids == found[-1][..., None], -jnp.inf, logits)
    return jnp.stack(found, -1)


def _learn(table: Array, token: Array, live: Array, said: Array) -> Array:
    """Writes ``said [N, K]`` after the live ``token [N]``; of equal ones the last."""
    later = jnp.triu(token[:, None] == token, 1) & live
    last = live & ~jnp.any(later, -1)
    at = jnp.where(last, token, table.shape[0])
    return table.at[at].set(said.astype(table.dtype), mode="drop")


def _learn_bigrams(table: Array, tokens: Array, length: Array) -> Array:
    """Puts what follows each token of a prompt in front of what was known of it."""

    def step(i, table: Array) -> Array:
        old, new = table[tokens[i]], tokens[i + 1]
        # The new one first, then the others in their order, without a second copy of it.
        rest = jnp.argsort(old == new, stable=True)
        return table.at[tokens[i]].set(jnp.roll(old[rest], 1).at[0].set(new))

    return lax.fori_loop(0, length - 1, step, table)
