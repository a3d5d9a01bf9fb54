"""Topologies: what the ``parent`` array of a block implies, and trees known beforehand."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from jspec.types import Array


def ancestors(parent: Array) -> Array:
    """Ancestor-or-self mask ``[..., N, N]`` of ``parent [..., N]`` (-1 at the root).

    ``mask[i, j]`` is true iff node ``j`` is node ``i`` or one of its ancestors, which is
    exactly what node ``i`` may attend to inside its block. Path doubling: log2(N)
    boolean products instead of N dependent steps.
    """
    n = parent.shape[-1]
    node = jnp.arange(n)
    reach = (node == node[:, None]) | (node == parent[..., None])
    span = 1
    while span < n - 1:
        step = reach.astype(jnp.float32)
        reach = jnp.einsum("...ij,...jk->...ik", step, step) > 0
        span *= 2
    return reach


def depth(mask: Array) -> Array:
    """Depth ``[..., N]`` of every node (root 0) from its ancestor mask."""
    return jnp.sum(mask, -1, dtype=jnp.int32) - 1


def path_to(mask: Array, leaf: Array) -> Array:
    """Nodes ``[N]`` from the root to ``leaf`` (scalar), -1 after the end.

    Ancestors have smaller ids than descendants, so sorting the ids orders the path.
    """
    n = mask.shape[-1]
    nodes = jnp.sort(jnp.where(mask[leaf], jnp.arange(n), n))
    return jnp.where(nodes < n, nodes, -1).astype(jnp.int32)


# Topologies that are known before decoding


class Topology(NamedTuple):
    """A tree by what its nodes are, not by their tokens. Hashable, so static in ``jit``.

    Node 0 is the root; levels follow one another and siblings stand by rank.

    Attributes:
      parent: per node, -1 at the root.
      rank: per node, which of its parent's guesses it is, from 0; -1 at the root.
    """

    parent: tuple[int, ...]
    rank: tuple[int, ...]

    @property
    def nodes(self) -> int:
        return len(self.parent)

    @property
    def level(self) -> tuple[int, ...]:
        """Depth of every node."""
        depths = [0]
        for up in self.parent[1:]:
            depths.append(depths[up] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        return self.level[-1]

    @property
    def paths(self) -> list[tuple[int, ...]]:
        """The ranks on the way to every node but the root."""
        found: list[tuple[int, ...]] = [()]
        for up, rank in zip(self.parent[1:], self.rank[1:], strict=True):
            found.append((*found[up], rank))
        return found[1:]


def from_paths(paths: Iterable[Iterable[int]]) -> Topology:
    """A tree from the rank paths of its nodes, the root left out, in any order.

    This is how Medusa and EAGLE-1 write their trees: ``[0, 2]`` is the third guess after
    the first guess.

    Raises:
      ValueError: no path, one path twice, or a path whose beginning is missing.
    """
    ordered = sorted((tuple(p) for p in paths), key=_by_level)
    index: dict[tuple[int, ...], int] = {(): 0}
    parent, rank = [-1], [-1]
    for path in ordered:
        if not path or path in index:
            raise ValueError(f"path {list(path)} is empty or stands there twice")
        if path[:-1] not in index or path[-1] < 0:
            raise ValueError(f"path {list(path)} has no parent {list(path[:-1])}")
        index[path] = len(parent)
        parent.append(index[path[:-1]])
        rank.append(path[-1])
    if not ordered:
        raise ValueError("a tree needs at least one path")
    return Topology(tuple(parent), tuple(rank))


def _by_level(path: tuple[int, ...]) -> tuple:
    return len(path), path


def line(gamma: int) -> Topology:
    """A chain of ``gamma`` drafts.

    Raises:
      ValueError: if ``gamma < 1``.
    """
    return expansion([1] * gamma)


def expansion(widths: Sequence[int]) -> Topology:
    """SpecInfer's expansion vector: nodes of level ``i`` have ``widths[i]`` children each.

    Source: Miao et al. 2305.09781, section 3.

    Raises:
      ValueError: no widths, or one below 1.
    """
    if not widths or min(widths) < 1:
        raise ValueError(
            f"widths are {list(widths)}; need one or more, each at least 1"
        )
    levels: list[list[tuple[int, ...]]] = [[()]]
    for width in widths:
        levels.append([(*p, r) for p in levels[-1] for r in range(width)])
    return from_paths(p for level in levels[1:] for p in level)


def best_first(accuracy: ArrayLike, nodes: int) -> Topology:
    """The tree of ``nodes`` nodes whose expected tau is largest, if guesses are independent.

    Grown by the most probable path that is still missing. Source: Cai et al. 2401.10774,
    section 2.3.3.

    Args:
      accuracy: ``[D, K]``, probability that guess ``k`` at depth ``d`` is right.
      nodes: with the root.

    Raises:
      ValueError: fewer than two nodes, or more than the guesses can fill.
    """
    table = np.asarray(accuracy, np.float64)
    heap: list[tuple[float, int, tuple[int, ...]]] = []

    def push(path: tuple[int, ...], chance: float) -> None:
        heapq.heappush(heap, (-chance, len(path), path))

    push((0,), table[0, 0])
    taken: list[tuple[int, ...]] = []
    while len(taken) < nodes - 1 and heap:
        chance, _, path = heapq.heappop(heap)
        taken.append(path)
        depth, rank = len(path) - 1, path[-1]
        if rank + 1 < table.shape[1]:
            before = -chance / max(table[depth, rank], 1e-30)
            push((*path[:-1], rank + 1), before * table[depth, rank + 1])
        if depth + 1 < table.shape[0]:
            push((*path, 0), -chance * table[depth + 1, 0])
    _check_size(nodes, len(taken) + 1)
    return from_paths(taken)


def sequoia(acceptance: ArrayLike, nodes: int, depth: int) -> Topology:
    """The tree of largest expected tau when a child's chance depends on its rank.

    ``F_d[m] = 1 + sum over children k of P[d][k] F_{d+1}[m_k]``, maximised over how the
    ``m - 1`` nodes below are shared out. Source: Chen et al. 2402.12374, section 3.1, with
    a depth of its own for every row of ``P``.

    Args:
      acceptance: ``[K]`` or ``[D, K]``, measured probability that child ``k`` is the one
        that is accepted, given that its parent is; need not fall with ``k``.
      nodes: with the root.  depth: most levels below the root.

    Raises:
      ValueError: fewer than two nodes, or more than fit in ``depth`` levels.
    """
    table = np.asarray(acceptance, np.float64)
    table = np.broadcast_to(np.atleast_2d(table), (depth, table.shape[-1]))
    ranks = table.shape[1]
    full = np.full(nodes + 1, -np.inf)
    best = np.where(np.arange(nodes + 1) == 1, 1.0, full)  # leaves at the last level
    shares: list[np.ndarray] = []  # [d][m, k]: nodes given to child k of m
    for chances in table[::-1]:
        # grown[m]: a node, its first k children and what hangs on them, m nodes in all.
        grown, given = best.copy(), np.zeros((nodes + 1, ranks), int)
        grown[:] = np.where(np.arange(nodes + 1) == 1, 1.0, -np.inf)
        top, choice = grown.copy(), np.zeros((nodes + 1, ranks), int)
        for k in range(ranks):
            new, part = full.copy(), np.zeros(nodes + 1, int)
            for m in range(2 + k, nodes + 1):
                sizes = np.arange(1, m)
                value = grown[m - sizes] + chances[k] * best[sizes]
                part[m] = sizes[int(np.argmax(value))]
                new[m] = value.max()
            given = given[np.maximum(np.arange(nodes + 1) - part, 0)]
            given[:, k] = part
            grown = new
            better = grown > top
            top = np.where(better, grown, top)
            choice = np.where(better[:, None], given, choice)
        best = top
        shares.append(choice)
    shares.reverse()
    paths: list[tuple[int, ...]] = []

    def place(path: tuple[int, ...], size: int) -> None:
        if len(path) == depth:
            return
        for rank, part in enumerate(shares[len(path)][size]):
            if part:
                paths.append((*path, rank))
                place((*path, rank), int(part))

    if nodes < 2 or not np.isfinite(best[nodes]):
        raise ValueError(
            f"{nodes} nodes do not fit: {depth} levels of {ranks} children, at least 2 nodes"
        )
    place((), nodes)
    return from_paths(paths)


def _check_size(wanted: int, found: int) -> None:
    if wanted < 2 or found < wanted:
        raise ValueError(f"{wanted} nodes asked for; need 2 to {found}")


# Published trees, a digit a rank. Medusa's is "mc_sim_7b_63" of its repository, EAGLE-1's
# goes by the same name in its own.
_MEDUSA = """
0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12
003 40 21 004 005 0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15
101 021 90 060 0001 16 070
"""
_EAGLE = """
0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001
"""
MEDUSA_63 = from_paths(map(int, path) for path in _MEDUSA.split())
EAGLE_25 = from_paths(map(int, path) for path in _EAGLE.split())
