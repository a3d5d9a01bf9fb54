"""Every block a drafter can propose, with its probability, for tiny vocabularies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

Prefix = tuple[int, ...]  # tokens after the root
Table = Callable[[Prefix], np.ndarray]


class Scheme(NamedTuple):
    """How a block is drafted.

    Attributes:
      parent: N parents, -1 first; siblings in draw order.
      kind: "replace" or "without": siblings are drawn with or without replacement.
        "point": they are chosen, the k-th child being the k-th token of ``draw``.
      draw: ``prefix -> [V]``, the law that children are drawn from; for "point" the
        tokens to choose, at least one for each child.
      live: ``(tokens, i) -> bool``: is node i drawn at all, given all nodes before it?
      vote: N booleans; None = all. False marks probe nodes.
      claim: ``prefix -> [V']``, the row that the block shows; None = ``draw``.
      to_target: ``[V']`` target ids of the claimed rows; None = the ids agree.
    """

    parent: Sequence[int]
    kind: str
    draw: Table
    live: Callable[[Prefix, int], bool] = lambda tokens, i: True
    vote: Sequence[bool] | None = None
    claim: Table | None = None
    to_target: Sequence[int] | None = None


def branching(*children: int) -> tuple[int, ...]:
    """Parents of the tree whose nodes of depth d have ``children[d]`` children each.

    Breadth first; ``branching(1, 1)`` is a chain of two drafts, ``branching()`` a root.
    """
    parent, level = [-1], [0]
    for count in children:
        new = [v for v in level for _ in range(count)]
        level = list(range(len(parent), len(parent) + len(new)))
        parent += new
    return tuple(parent)


def random_law(seed: int, vocab: int = 4, zeros: int = 0) -> Table:
    """Random conditional probabilities ``prefix -> [vocab]``, ``zeros`` of them 0.

    Multiples of 2**-12, so that their float32 sums are exactly 1.
    """

    @functools.cache
    def law(prefix: Prefix) -> np.ndarray:
        random = np.random.default_rng((seed, vocab, zeros, len(prefix), *prefix))
        size = vocab - zeros
        share = random.multinomial(4096 - size, random.dirichlet(np.full(size, 0.8)))
        p = np.zeros(vocab, np.float32)
        p[random.permutation(vocab)[:size]] = (share + 1) / 4096
        return p

    return law


def random_target(seed: int, vocab: int = 4) -> Table:
    """``random_law``, truncated for odd seeds."""
    return random_law(seed, vocab, zeros=seed % 2)


def one_hot_law(seed: int, vocab: int = 4) -> Table:
    """A target of temperature 0: all mass on the best token of ``random_law``."""
    law = random_law(seed, vocab)
    return lambda prefix: np.eye(vocab, dtype=np.float32)[np.argmax(law(prefix))]


def ranking(law: Table) -> Table:
    """All tokens from the most to the least probable, for drafts of kind "point"."""
    return lambda prefix: np.argsort(-law(prefix), kind="stable")


def drafts(scheme: Scheme) -> Iterator[tuple[float, Prefix, tuple[bool, ...]]]:
    """``(chance, tokens, lives)`` of every block; a dead node holds an arbitrary id."""
    parent, nodes = scheme.parent, len(scheme.parent)

    def extend(chance: float, token: Prefix, live: tuple[bool, ...]):
        i = len(token)
        if i == nodes:
            yield chance, token, live
            return
        older = [j for j in range(1, i) if parent[j] == parent[i]]
        choice = {}
        if live[parent[i]] and scheme.live(token, i):
            above = prefix(parent, token, parent[i])
            choice = _choices(scheme, above, [token[j] for j in older if live[j]])
        if not choice:
            yield from extend(chance, (*token, token[-1]), (*live, False))
        for x, q in choice.items():
            yield from extend(chance * q, (*token, x), (*live, True))

    return extend(1.0, (0,), (True,))


def _choices(scheme: Scheme, above: Prefix, older: list[int]) -> dict[int, float]:
    """Probability of every token that the next child can have, after ``older`` ones."""
    if scheme.kind == "point":
        return {int(scheme.draw(above)[len(older)]): 1.0}
    q = np.array(scheme.draw(above), np.float64)
    if scheme.kind == "without":
        q[older] = 0
    return {int(x): q[x] / q.sum() for x in np.flatnonzero(q)}


def prefix(parent: Sequence[int], token: Prefix, node: int) -> Prefix:
    """Tokens on the path from the root, itself excluded, to ``node``."""
    return (*prefix(parent, token, parent[node]), token[node]) if node > 0 else ()


class Cases(NamedTuple):
    """D drafted blocks of N nodes, of NumPy or (inside a judge) of JAX.

    Attributes:
      chance: ``[D]`` float64, probability of drafting this block.
      token, parent, live, vote: ``[D, N]``.
      p: ``[D, N, V]`` target's law.  q: ``[D, N, V']`` claimed law or None.
    """

    chance: Any
    token: Any
    parent: Any
    live: Any
    vote: Any
    p: Any
    q: Any


def depth(parent: Sequence[int]) -> int:
    """Greatest depth of a node."""
    return max(len(prefix(parent, tuple(parent), i)) for i in range(len(parent)))


def cases(target: Table, scheme: Scheme, nodes: int = 0) -> Cases:
    """All drafts of ``scheme``, padded with dead nodes to at least ``nodes``.

    Raises:
      ValueError: if the kind is unknown.
    """
    if scheme.kind not in ("replace", "without", "point"):
        raise ValueError(f"unknown kind {scheme.kind!r}")
    used = len(scheme.parent)
    pad = max(0, nodes - used)
    blocks = [(c, t + t[-1:] * pad, on + (False,) * pad) for c, t, on in drafts(scheme)]
    prefixes = [
        [prefix(scheme.parent, t, i) for i in range(used)] for _, t, _ in blocks
    ]

    def table(law: Table) -> np.ndarray:
        known = {x: np.asarray(law(x), np.float32) for b in prefixes for x in b}
        return np.stack([[known[x] for x in b + b[-1:] * pad] for b in prefixes])

    chance, token, live = (np.array(x) for x in zip(*blocks, strict=True))
    # Dead nodes continue a chain, so that rules for chains meet one.
    parent = np.array([*scheme.parent, *range(used - 1, used - 1 + pad)], np.int32)
    vote = np.array([*(scheme.vote or [True] * used), *[True] * pad])
    return Cases(
        chance=chance,
        token=token.astype(np.int32),
        parent=np.broadcast_to(parent, token.shape),
        live=live,
        vote=np.broadcast_to(vote, token.shape),
        p=table(target),
        q=None if scheme.kind == "point" else table(scheme.claim or scheme.draw),
    )


def merge(parts: Sequence[Cases]) -> Cases:
    """The blocks of ``parts`` one after the other; all with q or all without."""
    return Cases(
        *(None if x[0] is None else np.concatenate(x) for x in zip(*parts, strict=True))
    )
