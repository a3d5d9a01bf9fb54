"""The exact law of what an accept rule emits, for any rule, by enumeration.

``emitted_law`` takes a rule as a black box. It lists every draft with the probability
of drawing it, integrates the uniforms, and continues what one round emits with the
target's own law, so that all outcomes are equally long; a rule is lossless if and only
if their joint law is the target's. ``assert_lossless`` does so for a battery of shapes,
ways of drawing and degenerate cases.

For given tokens an outcome is piecewise constant in each uniform. A box of uniforms is
cut wherever the outcome changes along one axis, at the breakpoint found by bisection to
the resolution of float32, until nothing changes along any axis from the box's lowest
corner, from its highest, or from two random points. What is rarer than all of these
would be missed, but comparisons decide in some order, and the first shows in a corner.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.testing import enumeration
from jspec.testing.enumeration import (
    Cases,
    Draft,
    Prefix,
    Table,
    branching,
    random_law,
    ranking,
)
from jspec.types import Array, Block, Law, Noise, Rule, TargetLaw

_CHUNK = 512  # boxes or drafts judged in one call
_HALVINGS = 26
_MOST_PIECES = 400  # a draft


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


def emitted_law(
    rule: Rule, target: Table, draft: Draft, *, nodes: int = 0, rows: int = 0
) -> Emission:
    """Exact law of the tokens that ``rule`` emits, its uniforms integrated out.

    Args:
      rule: reads ``noise.accept`` and ``noise.next``; ``noise.race`` is constant.
      target: ``prefix -> [V]``, the target's law; V up to 5 is practical.
      draft: how the block is drafted.
      nodes, rows: pad the block with dead nodes and the races with rows to at least
        these sizes, so that calls for different topologies share one compilation.

    Raises:
      ValueError: if the rule accepts a path that does not exist in the block, emits an
        id outside the vocabulary, or is not piecewise constant in its uniforms.
    """
    cases = enumeration.cases(target, draft, nodes, rows)
    which = np.arange(len(cases.chance))
    low = np.zeros((len(which), cases.token.shape[1] + 1), np.float32)
    high = np.ones_like(low)
    random = np.random.default_rng(0)
    budget = _MOST_PIECES * len(which)
    codes, weights = [], []
    while len(which):
        budget -= len(which)
        if budget < 0:
            raise ValueError("the rule is not piecewise constant in its uniforms")
        inner = random.uniform(size=(2, *low.shape)).astype(np.float32)
        inside = np.clip(low + inner * (high - low), low, np.nextafter(high, low))
        found, axis, cut, code = _run(_cuts(rule), cases, which, low, high, *inside)
        done = ~found
        codes.append(code[done])
        volume = np.prod((high - low)[done].astype(np.float64), -1)
        weights.append(volume * cases.chance[which[done]])
        low, high, which, axis, cut = (x[found] for x in (low, high, which, axis, cut))
        here = np.arange(len(which)), axis
        below, above = high.copy(), low.copy()
        below[here] = above[here] = cut
        low, high = np.concatenate([low, above]), np.concatenate([below, high])
        which = np.concatenate([which, which])
    return _emission(target, cases, np.concatenate(codes), np.concatenate(weights))


def raced_law(
    rule: Rule, target: Table, draft: Draft, *, nodes: int = 0, rows: int = 0
) -> Emission:
    """``emitted_law`` of a rule that reads ``noise.race`` instead of the uniforms.

    Exponential variates r make ``argmax p / r`` a draw from p, so the races are
    integrated by their winners: for every sequence of L tokens, weighted with its
    probability, each token is made to win its race under its own p by a hair. A rule
    that races another law, or at another depth, meets other winners.
    """
    cases = enumeration.cases(target, draft, nodes, rows)
    vocab, which = cases.p.shape[-1], np.arange(len(cases.chance))
    codes, weights = [], []
    for winners in np.ndindex(*[vocab] * cases.length):
        race, weight = np.ones((cases.rows, vocab), np.float32), 1.0
        for d, y in enumerate(winners):
            p = np.asarray(target(winners[:d]), np.float32)
            race[d] = np.where(p > 0, p, 1)
            race[d, y] *= 1 - 1e-3
            weight *= float(p[y])
        if weight > 0:
            races = np.broadcast_to(race, (len(which), *race.shape))
            codes.append(_run(_judge(rule), cases, which, races)[0])
            weights.append(weight * cases.chance)
    return _emission(target, cases, np.concatenate(codes), np.concatenate(weights))


def _run(f: Callable, cases: Cases, which: np.ndarray, *arrays: np.ndarray):
    """``f`` on chunks of one size, with the drafts that ``which`` picks."""
    outs = []
    for start in range(0, len(which), _CHUNK):
        # The last chunk repeats its last element.
        part = np.minimum(np.arange(start, start + _CHUNK), len(which) - 1)
        at = which[part]
        q = None if cases.q is None else cases.q[at]
        law = Law(q, cases.to_target, cases.replace)
        block = Block(cases.token[at], cases.parent, cases.live[at], cases.vote, law)
        out = f(block, cases.p[at], *(x[part] for x in arrays), rows=cases.rows)
        outs.append([np.asarray(x)[: len(which) - start] for x in out])
    out = [np.concatenate(x) for x in zip(*outs, strict=True)]
    if np.any(out[-1] < 0):
        raise ValueError("the rule left the block or the vocabulary")
    return out


def _outcome(rule: Rule, noise: Noise, block: Block, p: Array) -> Array:
    """Emitted tokens as one number, digits in base V + 1; -1 for an impossible verdict."""
    nodes, vocab = p.shape
    out = rule(noise, block, TargetLaw(p, jnp.argmax(p, -1).astype(jnp.int32)))
    step = jnp.arange(min(noise.race.shape[0], nodes))
    path = out.path[: len(step)]
    after = jnp.append(path[1:], -1)
    child = jnp.maximum(after, 0)
    alive = block.live[child] & block.vote[child]
    good = alive & (after > 0) & (block.parent[child] == path)
    inside = step < out.n_accept
    valid = (path[0] == 0) & jnp.all(jnp.where(inside, good, after == -1))
    valid &= (out.n_accept >= 0) & (out.n_accept < len(step))
    valid &= (out.next_token >= 0) & (out.next_token < vocab)
    token = jnp.where(inside, block.token[child], out.next_token)
    digit = jnp.where(step <= out.n_accept, token, vocab)
    return jnp.where(valid, jnp.sum(digit * (vocab + 1) ** step), -1)


def _over_drafts(rule: Rule, block: Block, p: Array) -> Callable[[Noise], Array]:
    """``_outcome [E]`` of E drafts, of which topology and id map are shared."""

    def one(noise, token, live, q, p):
        law = dataclasses.replace(block.law, q=q)
        return _outcome(rule, noise, block.replace(token=token, live=live, law=law), p)

    return lambda noise: jax.vmap(one)(noise, block.token, block.live, block.law.q, p)


@functools.lru_cache(maxsize=64)
def _judge(rule: Rule) -> Callable:
    """Outcomes ``[E]`` for races ``[E, P, V]``; the uniforms are constant."""

    @functools.partial(jax.jit, static_argnames="rows")
    def judge(block: Block, p: Array, race: Array, *, rows: int):
        del rows
        half = jnp.full(p.shape[:2], 0.5)
        return (_over_drafts(rule, block, p)(Noise(half, half[:, 0], race)),)

    return judge


@functools.lru_cache(maxsize=64)
def _cuts(rule: Rule) -> Callable:
    """Where to cut boxes ``low, high [E, K]``: ``(found, axis, cut, outcome)``, ``[E]``.

    The uniforms of a box are ``low <= u < high``, the last axis being ``noise.next``.
    One loop judges one point of every box at a time, so that the rule is compiled once:
    from each of four points it goes to the end of every axis, then it bisects.
    """

    @functools.partial(jax.jit, static_argnames="rows")
    def cuts(block: Block, p: Array, low, high, first, second, *, rows: int):
        boxes, axes = low.shape
        judge = _over_drafts(rule, block, p)
        race = jnp.ones((boxes, rows, p.shape[-1]))
        top = jnp.nextafter(high, low)
        start = jnp.stack([low, top, first, second])
        end = jnp.stack([top, low, low, top])
        box, column = jnp.arange(boxes), jnp.arange(axes)
        tests = len(start) * (axes + 1)

        def judge_at(corner, axis, value):
            u = jnp.where(column == axis[:, None], value[:, None], start[corner, box])
            return judge(Noise(u[:, :-1], u[:, -1], race))

        def step(t, s):
            test = t < tests
            corner = jnp.where(test, t // (axes + 1), s["corner"])
            axis = jnp.where(test, t % (axes + 1) - 1, s["axis"])
            away = end[corner, box, axis]
            value = jnp.where(test, away, (s["near"] + s["far"]) / 2)
            code = judge_at(corner, axis, value)
            new = test & (axis >= 0) & ~s["found"] & (code != s["base"])
            same = ~test & (code == s["old"])
            near = jnp.where(same, value, s["near"])
            far = jnp.where(test | same, s["far"], value)
            return {
                "base": jnp.where(test & (axis < 0), code, s["base"]),
                "found": s["found"] | new,
                "worst": jnp.minimum(s["worst"], code),
                "corner": jnp.where(new, corner, s["corner"]),
                "axis": jnp.where(new, axis, s["axis"]),
                "old": jnp.where(new, s["base"], s["old"]),
                "near": jnp.where(new, start[corner, box, axis], near),
                "far": jnp.where(new, away, far),
            }

        whole = jnp.zeros(boxes, jnp.int32)
        s = dict.fromkeys(("base", "worst", "corner", "axis", "old"), whole)
        s |= {"found": whole > 0} | dict.fromkeys(("near", "far"), jnp.zeros(boxes))
        s = lax.fori_loop(0, tests + _HALVINGS, step, s)
        code = jnp.where(s["worst"] < 0, -1, s["base"])
        return s["found"], s["axis"], jnp.maximum(s["near"], s["far"]), code

    return cuts


def _emission(target: Table, cases: Cases, codes, weights) -> Emission:
    """Continues every outcome to the common length and adds up."""
    vocab, length = cases.p.shape[-1], cases.length

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
    law: Callable[..., Emission] = emitted_law,
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
      law: ``emitted_law``, or ``raced_law`` for a rule that reads ``noise.race``.
      atol: bound on the total variation between emitted and plain law.

    Raises:
      AssertionError: naming shape, kind, case, seed and the total variation found.
      ValueError: as ``emitted_law``.
    """
    nodes = max(len(parent) for parent in shapes.values())
    for seed in seeds:
        for name, parent in shapes.items():
            for kind in kinds:
                for case, draft in battery(parent, kind, seed, seed == seeds[0]):
                    out = law(rule, target(seed), draft, nodes=nodes, rows=4)
                    if not out.distance <= atol:
                        raise AssertionError(
                            f"{getattr(rule, '__name__', rule)} is not lossless on "
                            f"{name}, kind {kind!r}, {case}, seed {seed}: total "
                            f"variation {out.distance:.3g} > {atol:.3g}"
                        )


def battery(
    parent: Sequence[int], kind: str, seed: int, edges: bool = True
) -> Iterator[tuple[str, Draft]]:
    """``(name, draft)`` of the cases of ``assert_lossless`` for one shape and kind."""
    q = random_law(seed + 1000, zeros=1)
    draft = Draft(parent, kind, ranking(q) if kind == "point" else q)
    yield "plain", draft
    if not edges or len(parent) == 1:
        return

    def live(prefix: Prefix, k: int) -> bool:
        return (sum(prefix) + len(prefix) + k) % 3 != 1

    yield "early stop", draft._replace(live=live)
    yield "probe", draft._replace(vote=[True] * (len(parent) - 1) + [False])
    if kind == "point":
        yield "repeated token", draft._replace(draw=lambda x: np.repeat(ranking(q)(x), 2))
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
