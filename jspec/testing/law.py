"""The exact law of what an accept rule emits, for any rule, by enumeration.

``emitted_law`` takes a rule as a black box. It lists every draft with the probability
of drawing it, integrates the uniforms, and continues what one round emits with the
target's own law, so that all outcomes are equally long; a rule is lossless if and only
if their joint law is the target's. ``assert_lossless`` does so for a battery of shapes,
ways of drawing and degenerate cases.

For given tokens an outcome is piecewise constant in each uniform. A box of uniforms is
cut wherever the outcome changes along one axis, at the breakpoint that a search finds to
the resolution of float32, until nothing changes along any axis from the box's lowest
corner, from its highest, or from two random points. What is rarer than all of these
would be missed, but comparisons decide in some order, and the first shows in a corner.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jspec.testing import enumeration
from jspec.testing.enumeration import (
    Draft,
    Prefix,
    Table,
    branching,
    random_law,
    ranking,
)
from jspec.testing.pieces import cuts, outcomes
from jspec.types import Law, Noise, Rule

_MOST_PIECES = 400  # a draft
_EDGE_SIZES = range(2, 6)  # larger blocks would cost much and show nothing new


class Emission(NamedTuple):
    """What a round emits, continued by the target's law to L = depth + 1 tokens.

    Attributes:
      law: ``[V] * L`` float64, joint law of the next L tokens.
      target: the same for plain sampling.
      tokens: expected number of tokens of the round itself, the bonus included.
    """

    law: np.ndarray
    target: np.ndarray
    tokens: float

    @property
    def distance(self) -> float:
        """Total variation between the two laws."""
        return 0.5 * float(np.abs(self.law - self.target).sum())


def emitted_law(rule: Rule, target: Table, draft: Draft) -> Emission:
    """Exact law of the tokens that ``rule`` emits, its uniforms integrated out.

    Args:
      rule: reads ``noise.accept`` and ``noise.next``; ``noise.race`` is constant.
      target: ``prefix -> [V]``, the target's law; V up to 5 is practical.
      draft: how the block is drafted.

    Raises:
      ValueError: if the rule accepts a path that does not exist in the block, emits an
        id outside the vocabulary, or is not piecewise constant in its uniforms.
    """
    return emitted_laws(rule, [(target, draft)])[0]


def emitted_laws(rule: Rule, pairs: Sequence[tuple[Table, Draft]]) -> list[Emission]:
    """``emitted_law`` of several targets and drafts of one kind, in one go.

    Smaller blocks are padded with dead nodes, and races with rows, to the largest. Of
    the drafts only topology, tables and lives may differ. Raises as ``emitted_law``.
    """
    cases, owner, law, rows = _merged(pairs)
    race = np.ones((1, rows, cases.p.shape[-1]), np.float32)

    def judge(which: np.ndarray, u: np.ndarray) -> np.ndarray:
        return outcomes(rule, cases, law, which, Noise(u[:, :-1], u[:, -1], race))

    which = np.arange(len(owner))
    low = np.zeros((len(which), cases.token.shape[1] + 1), np.float32)
    high = np.ones_like(low)
    random = np.random.default_rng(0)
    budget = _MOST_PIECES * len(which)
    parts = []
    while len(which):
        budget -= len(which)
        if budget < 0:
            raise ValueError("the rule is not piecewise constant in its uniforms")
        cut = cuts(judge, which, low, high, random)
        volume = np.prod((high - low).astype(np.float64), -1)
        parts.append([x[~cut.found] for x in (which, cut.code, volume)])
        low, high, which = (x[cut.found] for x in (low, high, which))
        here = np.arange(len(which)), cut.axis[cut.found]
        below, above = high.copy(), low.copy()
        below[here] = above[here] = cut.at[cut.found]
        low, high = np.concatenate([low, above]), np.concatenate([below, high])
        which = np.concatenate([which, which])
    which, code, volume = (np.concatenate(x) for x in zip(*parts, strict=True))
    weight = volume * cases.chance[which]
    return [
        _emission(target, draft, code[owner[which] == i], weight[owner[which] == i])
        for i, (target, draft) in enumerate(pairs)
    ]


def raced_law(rule: Rule, target: Table, draft: Draft) -> Emission:
    """``emitted_law`` of a rule that reads ``noise.race`` instead of the uniforms.

    Exponential variates r make ``argmax p / r`` a draw from p, so the races are
    integrated by their winners: for every sequence of L tokens, weighted with its
    probability, each token is made to win its race under its own p by a hair. A rule
    that races another law, or at another depth, meets other winners.
    """
    return raced_laws(rule, [(target, draft)])[0]


def raced_laws(rule: Rule, pairs: Sequence[tuple[Table, Draft]]) -> list[Emission]:
    """``raced_law`` of several targets and drafts of one kind, in one go."""
    cases, owner, law, rows = _merged(pairs)
    out = []
    for i, (target, draft) in enumerate(pairs):
        which = np.flatnonzero(owner == i)
        races, weights = _races(target, 1 + enumeration.depth(draft.parent), rows)
        case, race = (x.ravel() for x in np.meshgrid(which, np.arange(len(races))))
        half = np.full(cases.token.shape, np.float32(0.5))[case]
        noise = Noise(half, half[:, 0], races[race])
        code = outcomes(rule, cases, law, case, noise)
        out.append(_emission(target, draft, code, cases.chance[case] * weights[race]))
    return out


def _races(target: Table, length: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Races ``[R, P, V]`` that every possible sequence of tokens wins, and its chance."""
    vocab = len(target(()))
    races, weights = [], []
    for winners in np.ndindex(*[vocab] * length):
        race, weight = np.ones((rows, vocab), np.float32), 1.0
        for d, y in enumerate(winners):
            p = np.asarray(target(winners[:d]), np.float32)
            race[d] = np.where(p > 0, p, 1)
            race[d, y] *= 1 - 1e-3
            weight *= float(p[y])
        if weight > 0:
            races.append(race)
            weights.append(weight)
    return np.stack(races), np.array(weights)


def _merged(pairs: Sequence[tuple[Table, Draft]]):
    """All blocks, the pair that each belongs to, their common law and rows of races."""
    draft = pairs[0][1]
    nodes = max(len(draft.parent) for _, draft in pairs)
    parts = [enumeration.cases(target, draft, nodes) for target, draft in pairs]
    owner = np.repeat(np.arange(len(parts)), [len(x.chance) for x in parts])
    to_target = None if draft.to_target is None else np.array(draft.to_target)
    law = Law(None, to_target, draft.kind != "without")
    rows = 1 + max(enumeration.depth(draft.parent) for _, draft in pairs)
    return enumeration.merge(parts), owner, law, rows


def _emission(target: Table, draft: Draft, codes, weights) -> Emission:
    """Continues every outcome to the common length and adds up."""
    vocab, length = len(target(())), 1 + enumeration.depth(draft.parent)

    @functools.cache
    def plain(prefix: Prefix) -> np.ndarray:
        if len(prefix) == length:
            return np.ones(())
        p = np.asarray(target(prefix), np.float64)
        return np.stack([p[x] * plain((*prefix, x)) for x in range(vocab)])

    law, tokens = np.zeros([vocab] * length), 0.0
    for code, weight in enumerate(np.bincount(codes, weights)):
        digits = [code // (vocab + 1) ** i % (vocab + 1) for i in range(length)]
        emitted = tuple(x for x in digits if x < vocab)
        if weight > 0:
            law[emitted] += weight * plain(emitted)
            tokens += float(weight) * len(emitted)
    return Emission(law, plain(()), tokens)


# The assertion

CHAINS = {
    "the empty block": branching(),
    "a chain of 1": branching(1),
    "a chain of 2": branching(1, 1),
    "a chain of 3": branching(1, 1, 1),
}
TREES = {
    "the tree (2, 1)": branching(2, 1),
    "the tree (2, 2)": branching(2, 2),
}


def assert_lossless(
    rule: Rule,
    *,
    shapes: Mapping[str, Sequence[int]] = CHAINS | TREES,
    kinds: Sequence[str] = ("replace", "without", "point"),
    seeds: Sequence[int] = (0, 1),
    target: Callable[[int], Table] = random_law,
    laws: Callable[..., list[Emission]] = emitted_laws,
    atol: float = 1e-6,
) -> None:
    """Asserts that ``rule`` keeps the target's law, by exact integration.

    The battery is every shape, kind and seed, and for the first seed also drafts that
    end early, drafts with a probe node, and, if drawn, rows of q that are NaN, infinite
    or zero, or, if chosen, siblings that repeat a token.

    Args:
      rule: ``(noise, block, target) -> Verdict`` for one sequence.
      shapes: name -> parents; ``CHAINS`` for a rule that takes chains only.
      kinds: how children are drawn, see ``Draft``.
      seeds: of the random targets and drafts.
      target: seed -> target; ``one_hot_law`` for a rule for temperature 0.
      laws: ``emitted_laws``, or ``raced_laws`` for a rule that reads ``noise.race``.
      atol: bound on the total variation between emitted and plain law.

    Raises:
      AssertionError: naming shape, kind, case, seed and the total variation found.
      ValueError: as ``emitted_law``.
    """
    for kind in kinds:
        names, pairs = [], []
        for seed in seeds:
            for name, parent in shapes.items():
                for case, draft in battery(parent, kind, seed, seed == seeds[0]):
                    names.append(f"{name}, kind {kind!r}, {case}, seed {seed}")
                    pairs.append((target(seed), draft))
        for name, out in zip(names, laws(rule, pairs), strict=True):
            if not out.distance <= atol:
                raise AssertionError(
                    f"{getattr(rule, '__name__', rule)} is not lossless on {name}: "
                    f"total variation {out.distance:.3g} > {atol:.3g}"
                )


def battery(
    parent: Sequence[int], kind: str, seed: int, edges: bool = True
) -> Iterator[tuple[str, Draft]]:
    """``(name, draft)`` of the cases of ``assert_lossless`` for one shape and kind."""
    q = random_law(seed + 1000, zeros=1)
    draft = Draft(parent, kind, ranking(q) if kind == "point" else q)
    yield "plain", draft
    if not edges or len(parent) not in _EDGE_SIZES:
        return

    def live(prefix: Prefix, k: int) -> bool:
        return (sum(prefix) + len(prefix) + k) % 3 != 1

    yield "early stop", draft._replace(live=live)
    yield "probe", draft._replace(vote=[True] * (len(parent) - 1) + [False])
    if kind == "point":
        yield (
            "repeated token",
            draft._replace(draw=lambda x: np.repeat(ranking(q)(x), 2)),
        )
        return

    def claim(prefix: Prefix) -> np.ndarray:
        row = q(prefix).copy()
        fault = (sum(prefix) + len(prefix)) % 5
        if fault < 4:
            row[(0, 1, slice(None), slice(None))[fault]] = (np.nan, np.inf, 0, np.nan)[
                fault
            ]
        return row

    yield "degenerate q", draft._replace(claim=claim)
