"""Where every random number of a round comes from.

A sequence's key is folded with (round) for drafting and judging, and apart from that
with (absolute position) for the coupled rule. The two streams never meet, and neither
knows of the rest of the batch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jspec.options import Sampling
from jspec.types import Array, Noise

_ROUND, _RACE = 1, 2  # what a sequence's key is folded with first


def row_keys(sampling: Sampling, round: Array) -> tuple[Array, Array]:
    """Keys ``[B]`` to draft with and keys ``[B]`` to judge with, of (seed, round).

    ``round [B]`` counts the rounds of each sequence, so that its draws depend on its
    seed and its own history only.
    """

    def one(key, i):
        key = jax.random.fold_in(jax.random.fold_in(key, _ROUND), i)
        return jax.random.split(key)

    keys = jax.vmap(one)(sampling.key, round)
    return keys[:, 0], keys[:, 1]


def noise(
    key: Array, sampling: Sampling, length: Array, nodes: int, rows: int, vocab: int
) -> Noise:
    """All noise of one verification.

    Args:
      key: ``[B]`` keys to judge with, consumed; the draft must not have used them.
      sampling: gives the keys of the race.
      length: ``[B]`` committed tokens, the pending one included.
      nodes, rows, vocab: N, P and V of ``Noise``.
    """

    def one(key):
        k_accept, k_next = jax.random.split(key)
        return jax.random.uniform(k_accept, (nodes,)), jax.random.uniform(k_next)

    accept, last = jax.vmap(one)(key)
    return Noise(accept, last, race(sampling, length, rows, vocab))


def race(sampling: Sampling, length: Array, rows: int, vocab: int) -> Array:
    """Exponential variates ``[B, P, V]``, float32, > 0: ``argmin(race / p)`` draws ``p``.

    Row ``d`` depends on the seed and on the position ``length + d`` only. Folded apart
    from ``row_keys``, so that the two never meet.

    Small variates decide a race, so 31 bits with full relative precision near 0 are
    used; 23 bits would make ties, and a zero would beat any probability.
    """

    def one(key, position):
        key = jax.random.fold_in(jax.random.fold_in(key, _RACE), position)
        bits = jax.random.bits(key, (vocab,), jnp.uint32) >> 1
        u = bits.astype(jnp.int32).astype(jnp.float32) * 2.0**-31 + 2.0**-32
        return -jnp.log1p(-jnp.minimum(u, 1 - 2.0**-24))

    position = length[:, None] + jnp.arange(rows)
    return jax.vmap(jax.vmap(one, (None, 0)))(sampling.key, position)
