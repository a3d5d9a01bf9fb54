"""Suffix decoding: copy what followed, as much of it as the past makes probable.

Oliaro et al. 2411.04975, in the form of ArcticInference. For every suffix of the text, of
m = 1, 2 .. tokens, the occurrences of it form a tree of continuations. A node's chance is
the share of occurrences that go through it; a suffix may draft up to ``factor * m + offset``
tokens, none of a chance below ``least``; its score is the sum of the chances, the expected
number of accepted drafts. The suffix with the best score drafts, the longer one of equals.

The occurrences come from the sequence itself and, where there is one, from a store of
other texts (``jspec.drafters.store``), which drafts if its score is the better one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec.drafters import paths, store
from jspec.drafters.occurrences import occurrences
from jspec.drafters.paths import Nodes, Paths
from jspec.state import pending
from jspec.types import Array, Context, Drafter, DraftShape


@struct.dataclass
class Suffix:
    """State: ``score [B]`` float32, drafts expected to be accepted in the last block."""

    score: Array


class Rates(NamedTuple):
    """How far a match may reach: ``max_spec_factor``, ``_offset`` and ``min_token_prob``."""

    factor: float = 1.0
    offset: float = 0.0
    least: float = 0.1


PUBLISHED = Rates()


# (chance [K, G], same [K, K, G], live [K, G]) -> which nodes may be drafted, [K, G].
Keep = Callable[[Array, Array, Array], Array]


def path(chance: Array, same: Array, live: Array) -> Array:
    """The most frequent child of the most frequent child of ..: a chain."""

    def step(alive: Array, level):
        chance, same = level
        value = jnp.where(alive, chance, 0)
        top = jnp.argmax(value)
        alive &= same[top] & (value[top] > 0)
        return alive, alive

    levels = chance.T, jnp.moveaxis(same, -1, 0)
    return lax.scan(step, live[:, 0], levels)[1].T & live


def tree(chance: Array, same: Array, live: Array) -> Array:
    """All continuations, the most probable first."""
    del chance, same
    return live


@functools.cache
def suffix(
    gamma: int = 8,
    nodes: int | None = None,
    keep: Keep = path,
    longest: int = 24,
    rates: Rates = PUBLISHED,
    candidates: int = 32,
    stored: bool = False,
) -> Drafter:
    """Drafts by suffix decoding.

    The published trees count all occurrences; here the ``candidates`` best ones are, the
    longest match first and then the latest, or, in a store, an even sample of them. Where
    there are no more than that, score and drafts are the published ones, but for a bound
    on match and continuation together, which an index needs and this does not.

    Args:
      gamma: most tokens on a path.
      nodes: with the root; ``gamma + 1`` unless given.
      keep: ``path`` drafts a chain, ``tree`` a tree of the most probable nodes.
      longest: longest suffix to look for, in tokens.
      rates: factor, offset and least chance.
      candidates: occurrences that are counted.
      stored: are params a ``store.Store`` to be searched as well? Without, they are None.

    Raises:
      ValueError: sizes below 1, or a chance outside [0, 1].
    """
    nodes = gamma + 1 if nodes is None else nodes
    if min(gamma, nodes - 1, longest, candidates) < 1:
        raise ValueError(
            f"gamma {gamma}, {nodes} nodes, suffixes of {longest} tokens, {candidates} "
            "candidates; need at least 1, 2, 1 and 1"
        )
    if not 0 <= rates.least <= 1:
        raise ValueError(f"least chance is {rates.least}; it must be in [0, 1]")
    weigh = functools.partial(_weigh, nodes - 1, keep, rates)

    def local(tokens: Array, length: Array) -> _Draft:
        found = occurrences(tokens, length, longest, candidates, gamma)
        size = jnp.arange(1, longest + 1)
        reach = found.match >= size[:, None]
        # The published tree holds the end of the text too, which nothing follows yet.
        total = jnp.sum(reach, -1) + 1
        same = paths.agree(found.paths)
        of_every = jax.vmap(weigh, (0, 0, 0, None, None))
        return _best(of_every(size, reach, total, found.paths, same))

    def shared(params, tokens: Array, length: Array) -> _Draft:
        found = store.search(params, tokens, length, longest, candidates, gamma)
        size = jnp.arange(1, longest + 1)
        total = jnp.maximum(jnp.sum(found.reach, -1), 1)
        same = jax.vmap(paths.agree)(found.paths)
        return _best(jax.vmap(weigh)(size, found.reach, total, found.paths, same))

    def one(params, tokens: Array, length: Array) -> _Draft:
        own = local(tokens, length)
        if not stored:
            return own
        other = shared(params, tokens, length)
        return jax.tree.map(
            lambda a, b: jnp.where(own.score >= other.score, a, b), own, other
        )

    def init(params, context: Context) -> Suffix:
        del params
        return Suffix(jnp.zeros(context.length.shape, jnp.float32))

    def propose(params, state: Suffix, key, context: Context):
        del state, key
        drafts = jax.vmap(functools.partial(one, params))(
            context.tokens, context.length
        )
        block = paths.block(pending(context), *drafts.nodes[:3])
        return block, Suffix(drafts.score)

    return Drafter(
        DraftShape(nodes, gamma, widths=tuple(w for w in (1, 4) if w < nodes)),
        init,
        propose,
        update=lambda params, state, feedback: state,
    )


class _Draft(NamedTuple):
    """Nodes below the root, and the score of the block."""

    nodes: Nodes
    score: Array


def _weigh(
    nodes: int,
    keep: Keep,
    rates: Rates,
    size: Array,
    reach: Array,
    total: Array,
    found: Paths,
    same: Array,
) -> _Draft:
    """What the suffix of ``size`` tokens drafts, whose occurrences are ``reach [K]``."""
    chance = jnp.einsum("j,jkd->kd", reach.astype(jnp.float32), same) / total
    live = found.live & reach[:, None] & (chance >= rates.least)
    value = jnp.where(keep(chance, same, live), chance, 0)
    # A candidate's beginning belongs to one that matches at least as far, so to one that
    # this suffix reaches as well.
    best = paths.best(value, found, paths.owner(same), nodes)
    budget = jnp.floor(size * rates.factor + rates.offset + 1e-6)
    live = best.live & (jnp.arange(nodes) < budget)
    score = jnp.sum(jnp.where(live, best.value, 0))
    return _Draft(best._replace(live=live), score)


def _best(drafts: _Draft) -> _Draft:
    """The draft of the suffix with the largest score, the longest of equals."""
    last = drafts.score.shape[0] - 1 - jnp.argmax(drafts.score[::-1])
    return jax.tree.map(lambda x: x[last], drafts)
