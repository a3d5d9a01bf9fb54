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
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jspec.testing import enumeration
from jspec.testing.enumeration import (
    Prefix,
    Scheme,
    Table,
    branching,
    random_law,
    random_target,
    ranking,
)
from jspec.testing.pieces import cuts, outcomes
from jspec.types import Law, Rule

_MOST_PIECES = 400  # a block


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


def emitted_law(rule: Rule, target: Table, scheme: Scheme) -> Emission:
    """Exact law of the tokens that ``rule`` emits, its uniforms integrated out.

    Args:
      rule: reads ``noise.accept`` and ``noise.next``; ``noise.race`` is constant.
      target: ``prefix -> [V]``, the target's law; V up to 5 is practical.
      scheme: how the block is drafted.

    Raises:
      ValueError: if the rule accepts a path that does not exist in the block, emits an
        id outside the vocabulary, or is not piecewise constant in its uniforms.
    """
    return emitted_laws(rule, [(target, scheme)])[0]


def emitted_laws(rule: Rule, pairs: Sequence[tuple[Table, Scheme]]) -> list[Emission]:
    """``emitted_law`` of several targets and drafts of one kind, in one go.

    Smaller blocks are padded with dead nodes, and races with rows, to the largest. Of
    the drafts only topology, tables and lives may differ. Raises as ``emitted_law``.
    """
    cases, owner, law, rows = _merged(pairs)
    race = np.ones((1, rows, cases.p.shape[-1]), np.float32)

    def judge(which: np.ndarray, u: np.ndarray) -> np.ndarray:
        return outcomes(rule, cases, law, which, u, race)

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
        _emission(target, scheme, code[owner[which] == i], weight[owner[which] == i])
        for i, (target, scheme) in enumerate(pairs)
    ]


def raced_law(rule: Rule, target: Table, scheme: Scheme) -> Emission:
    """``emitted_law`` of a rule that reads ``noise.race`` instead of the uniforms.

    Exponential variates r make ``argmax p / r`` a draw from p, so the races are
    integrated by their winners: for every sequence of L tokens, weighted with its
    probability, each token is made to win its race under its own p by a hair. A rule
    that races another law, or at another depth, meets other winners.
    """
    return raced_laws(rule, [(target, scheme)])[0]


def raced_laws(rule: Rule, pairs: Sequence[tuple[Table, Scheme]]) -> list[Emission]:
    """``raced_law`` of several targets and drafts of one kind, in one go."""
    cases, owner, law, rows = _merged(pairs)
    out = []
    for i, (target, scheme) in enumerate(pairs):
        which = np.flatnonzero(owner == i)
        races, weights = _races(target, 1 + enumeration.depth(scheme.parent), rows)
        case, race = (x.ravel() for x in np.meshgrid(which, np.arange(len(races))))
        half = np.full((len(case), cases.token.shape[1] + 1), np.float32(0.5))
        code = outcomes(rule, cases, law, case, half, races[race])
        out.append(_emission(target, scheme, code, cases.chance[case] * weights[race]))
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


def _merged(pairs: Sequence[tuple[Table, Scheme]]):
    """All blocks, the pair that each belongs to, their common law and rows of races."""
    scheme = pairs[0][1]
    nodes = max(len(scheme.parent) for _, scheme in pairs)
    parts = [enumeration.cases(target, scheme, nodes) for target, scheme in pairs]
    owner = np.repeat(np.arange(len(parts)), [len(x.chance) for x in parts])
    to_target = None if scheme.to_target is None else jnp.array(scheme.to_target)
    law = Law(None, to_target, scheme.kind != "without")
    rows = 1 + max(enumeration.depth(scheme.parent) for _, scheme in pairs)
    return enumeration.merge(parts), owner, law, rows


def _emission(target: Table, scheme: Scheme, codes, weights) -> Emission:
    """Continues every outcome to the common length and adds up."""
    vocab, length = len(target(())), 1 + enumeration.depth(scheme.parent)

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
    "the tree (3,)": branching(3),
    "the tree (2, 1)": branching(2, 1),
    "a lopsided tree": (-1, 0, 1, 0, 2),
    "the tree (2, 2)": branching(2, 2),
}


def assert_lossless(
    rule: Rule,
    *,
    shapes: Mapping[str, Sequence[int]] = CHAINS | TREES,
    kinds: Sequence[str] = ("replace", "without", "point"),
    seeds: Sequence[int] = (0, 1),
    target: Callable[[int], Table] = random_target,
    laws: Callable[..., list[Emission]] = emitted_laws,
    atol: float = 1e-6,
) -> None:
    """Asserts that ``rule`` keeps the target's law, by exact integration.

    Args:
      rule: ``(noise, block, target) -> Verdict`` for one sequence.
      shapes: name -> parents; ``CHAINS`` for a rule that takes chains only.
      kinds: how children are drawn, see ``Scheme``.
      seeds: of the random targets and drafts.
      target: seed -> target; ``one_hot_law`` for a rule for temperature 0.
      laws: ``emitted_laws``, or ``raced_laws`` for a rule that reads ``noise.race``.
      atol: bound on the total variation between emitted and plain law.

    Raises:
      AssertionError: naming shape, kind, case, seed and the total variation found.
      ValueError: as ``emitted_law``.
    """
    for kind in kinds:
        cases = battery(shapes, kind, seeds, target)
        for name, out in zip(cases, laws(rule, list(cases.values())), strict=True):
            if not out.distance <= atol:
                raise AssertionError(
                    f"{getattr(rule, '__name__', rule)} is not lossless on {name}: "
                    f"total variation {out.distance:.3g} > {atol:.3g}"
                )


def battery(
    shapes: Mapping[str, Sequence[int]] = CHAINS | TREES,
    kind: str = "replace",
    seeds: Sequence[int] = (0, 1),
    target: Callable[[int], Table] = random_target,
) -> dict[str, tuple[Table, Scheme]]:
    """The named cases of ``assert_lossless`` for one kind.

    Every shape with every seed, plain and as ``edge_cases``. These are left out for
    shapes of 5 nodes after the first seed; larger shapes come once, and plain: they cost
    most and show least.
    """
    out = {}
    for name, parent in shapes.items():
        for seed in seeds if len(parent) <= 5 else seeds[:1]:
            q = random_law(seed + 1000, zeros=1)
            scheme = Scheme(parent, kind, ranking(q) if kind == "point" else q)
            variants = {"plain": scheme}
            if 1 < len(parent) < (6 if seed == seeds[0] else 5):
                variants |= edge_cases(scheme)
            for case, scheme in variants.items():
                label = f"{name}, kind {kind!r}, {case}, seed {seed}"
                out[label] = target(seed), scheme
    return out


def edge_cases(scheme: Scheme) -> dict[str, Scheme]:
    """Early ends, a probe node, and repeated tokens or rows of q that are no law."""
    parent = scheme.parent

    def live(token: Prefix, i: int) -> bool:
        return (sum(enumeration.prefix(parent, token, parent[i])) + 2 * i) % 3 != 1

    def claim(prefix: Prefix, start: int) -> np.ndarray:
        row, fault = scheme.draw(prefix).copy(), (sum(prefix) + len(prefix) + start) % 5
        if fault < 2:
            row[fault] = (np.inf, np.nan)[fault]
        return row if fault in (0, 1, 4) else row * (np.nan, 0)[fault - 2]

    cases = {
        "early stop": scheme._replace(live=live),
        "probe": scheme._replace(vote=[True] * (len(parent) - 1) + [False]),
    }
    if scheme.kind == "point":
        twice = scheme._replace(draw=lambda prefix: np.repeat(scheme.draw(prefix), 2))
        return cases | {"repeated token": twice}
    # With a faulty row at the root nothing below it is ever reached.
    faulty = {"degenerate q": 0, "degenerate q below the root": 4}
    return cases | {
        name: scheme._replace(claim=functools.partial(claim, start=start))
        for name, start in faulty.items()
    }
