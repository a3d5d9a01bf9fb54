"""How a block grows out of a drafter's guesses, level by level.

A network that extends paths (EAGLE, a multi-token-prediction module, Hydra) says what may
follow a node; a grower decides which nodes there are. Growers know nothing of networks,
networks nothing of trees: both meet in ``Extend``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jspec import sampling as smp
from jspec.sampling import Sampling
from jspec.tree import Topology, line
from jspec.types import Array, DraftShape

# Extends nodes of one level: ``(at, token [B, n], row [B, n]) -> (logits [B, n, V'], at)``.
# ``row`` says which row of the level before is a node's parent; ``at`` is the network's own
# record of that level. Tokens are draft ids. Heads that do not read the path give
# ``[B, 1, V']``, the same guesses for every node.
Extend = Callable[[Any, Array, Array], tuple[Array, Any]]


class Grown(NamedTuple):
    """The nodes below the root, in draft ids.

    Attributes:
      token: ``[B, N - 1]`` int32.
      parent: ``[B, N - 1]`` int32 node ids, the root being 0.
      live: ``[B, N - 1]`` bool.
      q: ``[B, N, V']`` law of every node's children, or None for point masses.
      score: ``[B, N - 1]`` float32, the drafter's log-probability of the path to a node.
    """

    token: Array
    parent: Array
    live: Array
    q: Array | None
    score: Array


class Grower(NamedTuple):
    """A way to grow blocks.

    Attributes:
      nodes, depth, dense, replace: as in ``DraftShape`` and ``Law``.
      grow: ``(extend, at, logits [B, V'], key [B], sampling) -> Grown``; ``logits`` and
        ``at`` are what the network says of the root.
      widths: as in ``DraftShape``.
    """

    nodes: int
    depth: int
    grow: Callable[..., Grown]
    dense: bool = False
    replace: bool = True
    widths: tuple[int, ...] = ()

    def shape(self, taps: tuple[int, ...]) -> DraftShape:
        """The shape of a drafter that grows its blocks so and reads ``taps``."""
        return DraftShape(self.nodes, self.depth, taps, self.dense, self.widths)


class _Levels(NamedTuple):
    """A topology cut into levels; everything is static.

    Attributes:
      row: per level, each node's parent as a row among the extended nodes one level up.
      rank: per level, each node's rank.
      inner: per level, positions (within the level) of the nodes that have children.
    """

    row: list[list[int]]
    rank: list[list[int]]
    inner: list[list[int]]


def _levels(topology: Topology) -> _Levels:
    level, parents = topology.level, set(topology.parent)
    rows, ranks, inners = [], [], []
    above = {0: 0}  # node -> row among the extended nodes of the level before
    for d in range(1, topology.depth + 1):
        nodes = [i for i in range(topology.nodes) if level[i] == d]
        rows.append([above[topology.parent[i]] for i in nodes])
        ranks.append([topology.rank[i] for i in nodes])
        inners.append([at for at, i in enumerate(nodes) if i in parents])
        above = {nodes[at]: row for row, at in enumerate(inners[-1])}
    return _Levels(rows, ranks, inners)


@functools.cache
def ranked(topology: Topology) -> Grower:
    """A static tree of the most probable guesses: node ``i`` is its parent's guess of rank
    ``topology.rank[i]``. Point masses."""
    levels = _levels(topology)

    def choose(logits: Array, count: int, key, depth, sampling):
        del key, depth, sampling
        token, value = _best(logits, count)
        return token, value, jnp.ones(token.shape, bool), None

    return _static(topology, levels, choose, dense=False)


@functools.cache
def sampled(topology: Topology) -> Grower:
    """A static tree of sampled guesses: siblings are drawn without replacement.

    The law is the drafter's own at the request's temperature and truncation; a node lives
    if its parent's law has that many tokens at all. For a chain this is the ordinary
    sampled draft. Source: Chen et al. 2402.12374 (Sequoia), Li et al. 2401.15077.

    Raises:
      ValueError: the children of a node are not its first ranks. A later draw is only
        lawful after the earlier ones were tried.
    """
    levels = _levels(topology)
    for parent in set(topology.parent[1:]):
        ranks = [r for p, r in zip(*topology, strict=True) if p == parent]
        if ranks != list(range(len(ranks))):
            raise ValueError(
                f"node {parent} has children of ranks {ranks}; sampled children must be "
                f"the first draws, 0 .. {len(ranks) - 1}"
            )

    def choose(logits: Array, count: int, key: Array, depth: int, sampling: Sampling):
        key = jax.vmap(lambda k: jax.random.fold_in(k, depth))(key)
        law = jax.vmap(lambda z: smp.draft_law(z, sampling), 1, 1)(logits)
        keys = jax.vmap(lambda k: jax.random.split(k, logits.shape[1]))(key)
        token = jax.vmap(jax.vmap(functools.partial(_draw_distinct, count)))(keys, law)
        exists = jnp.arange(count) < jnp.sum(law > 0, -1, keepdims=True)
        value = jnp.log(jnp.take_along_axis(law, token, -1))
        return token, value, exists, law

    return _static(topology, levels, choose, dense=True)


def chain(gamma: int, dense: bool = True) -> Grower:
    """A chain of ``gamma`` drafts: sampled from the drafter's law, or its best guesses.

    Raises:
      ValueError: if ``gamma < 1``.
    """
    if gamma < 1:
        raise ValueError(f"gamma is {gamma}; a drafter needs at least 1")
    return (sampled if dense else ranked)(line(gamma))


def _best(logits: Array, count: int) -> tuple[Array, Array]:
    """The ``count`` best tokens of ``logits [..., V']``, and their log-probabilities.

    Never above 0, in float32 as well, so that a path is never more probable than its
    beginning.
    """
    value, token = lax.top_k(logits, count)
    return token, value - jax.nn.logsumexp(logits, -1, keepdims=True)


def _draw_distinct(count: int, key: Array, p: Array) -> Array:
    """``count`` draws from ``p [V']`` without replacement, in the order drawn."""
    tokens = []
    for u in jax.random.uniform(key, (count,)):
        token = smp.draw(u, p)
        p = p.at[token].set(0)
        tokens.append(token)
    return jnp.stack(tokens)


def _static(topology: Topology, levels: _Levels, choose, dense: bool) -> Grower:
    """Grows ``topology``; ``choose`` picks the guesses of every extended node."""

    def grow(
        extend: Extend, at, logits: Array, key: Array, sampling: Sampling
    ) -> Grown:
        batch, vocab = logits.shape
        logits, score = logits[:, None], jnp.zeros((batch, 1))
        alive = jnp.ones((batch, 1), bool)
        tokens, lives, scores, laws = [], [], [], []
        for d, (row, rank, inner) in enumerate(zip(*levels, strict=True)):
            row, rank = jnp.asarray(row), jnp.asarray(rank)
            count = max(levels.rank[d]) + 1
            if dense:  # every node draws for itself
                logits = jnp.broadcast_to(logits, (batch, score.shape[1], vocab))
            token, value, exists, law = choose(logits, count, key, d, sampling)
            own = row if logits.shape[1] > 1 else jnp.zeros_like(row)
            token = token[:, own, rank].astype(jnp.int32)
            score = score[:, row] + value[:, own, rank]
            alive = alive[:, row] & exists[:, own, rank]
            tokens.append(token)
            lives.append(alive)
            scores.append(score)
            laws.append(law)
            if inner:
                inner = jnp.asarray(inner)
                rows = jnp.broadcast_to(row[inner], (batch, inner.size))
                logits, at = extend(at, token[:, inner], rows)
                score, alive = score[:, inner], alive[:, inner]
        parent = jnp.asarray(topology.parent[1:], jnp.int32)
        token = jnp.concatenate(tokens, 1)
        return Grown(
            token,
            jnp.broadcast_to(parent, token.shape),
            jnp.concatenate(lives, 1),
            _law_by_node(topology, levels, laws, vocab) if dense else None,
            jnp.concatenate(scores, 1),
        )

    return Grower(topology.nodes, topology.depth, grow, dense, replace=not dense)


def _law_by_node(topology: Topology, levels: _Levels, laws, vocab: int) -> Array:
    """The laws of the extended nodes at their node ids, zero at leaves: ``[B, N, V']``."""
    first, extended = 1, [0]
    for rank, inner in zip(levels.rank, levels.inner, strict=True):
        extended += [first + at for at in inner]
        first += len(rank)
    law = jnp.concatenate(laws, 1)
    q = jnp.zeros((law.shape[0], topology.nodes, vocab), law.dtype)
    return q.at[:, jnp.asarray(extended)].set(law)


@functools.cache
def dynamic(
    nodes: int, depth: int, width: int = 10, least: float = 0.0, widths=()
) -> Grower:
    """EAGLE-2's tree: of everything that was considered, the most probable nodes.

    Level by level the ``width`` best nodes are extended by their ``width`` best guesses;
    then the ``nodes - 1`` best of all candidates stay. They stand by falling probability,
    so that a parent comes before its children and the first ``w`` are the best tree of
    ``w`` nodes. Source: Li et al. 2406.16858, section 4.

    Args:
      nodes: with the root.
      depth: most drafts on a path.
      width: nodes extended a level, and guesses of each.
      least: nodes whose path is less probable than this are dead; with ``widths`` such
        rounds cost less.
      widths: as in ``DraftShape``.

    Raises:
      ValueError: sizes below 1, or more nodes than candidates.
    """
    if min(nodes - 1, depth, width) < 1:
        raise ValueError(
            f"{nodes} nodes, depth {depth}, width {width}; need at least 2, 1 and 1"
        )
    candidates = width + (depth - 1) * width * width
    if nodes - 1 > candidates:
        raise ValueError(
            f"{nodes} nodes, but depth {depth} and width {width} consider {candidates} "
            "candidates; lower nodes or raise the others"
        )

    def grow(
        extend: Extend, at, logits: Array, key: Array, sampling: Sampling
    ) -> Grown:
        del key, sampling
        token, score, parent = _candidates(extend, at, logits, depth, width)
        best, chosen = lax.top_k(score, nodes - 1)  # stable: parents before children
        up = jnp.take_along_axis(parent, chosen, 1)
        at_node = jnp.argmax(chosen[:, None, :] == up[:, :, None], -1) + 1
        return Grown(
            jnp.take_along_axis(token, chosen, 1),
            jnp.where(up < 0, 0, at_node).astype(jnp.int32),
            best >= (math.log(least) if least > 0 else -math.inf),
            None,
            best,
        )

    return Grower(nodes, depth, grow, widths=tuple(widths))


def _candidates(extend: Extend, at, logits: Array, depth: int, width: int):
    """Tokens, path log-probabilities and parents (-1 at level 1) of all candidates."""
    batch = logits.shape[0]
    token, score = _best(logits, width)
    parent = jnp.full_like(token, -1)
    tokens, scores, parents = [token], [score], [parent]
    frontier = jnp.broadcast_to(jnp.arange(width), (batch, width))  # candidate ids
    row, first = jnp.zeros_like(token), width
    for d in range(1, depth):
        logits, at = extend(at, token, row)
        guess, value = _best(logits, width)
        flat = (score[..., None] + value).reshape(batch, -1)
        guess = jnp.broadcast_to(guess, (batch, width, width)).reshape(batch, -1)
        tokens.append(guess)
        scores.append(flat)
        parents.append(jnp.repeat(frontier, width, 1))
        if d + 1 < depth:
            score, best = lax.top_k(flat, width)
            token, row = jnp.take_along_axis(guess, best, 1), best // width
            frontier = first + best
        first += width * width
    return (jnp.concatenate(x, 1) for x in (tokens, scores, parents))
