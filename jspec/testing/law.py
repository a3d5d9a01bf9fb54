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

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec.types import Array, Block, Law, Noise, Rule, TargetLaw

Prefix = tuple[int, ...]  # tokens after the root
Table = Callable[[Prefix], np.ndarray]

_CHUNK = 512  # boxes or drafts judged in one call
_HALVINGS = 26
_MOST_PIECES = 400  # a draft


class Draft(NamedTuple):
    """How a block is drafted.

    Attributes:
      parent: N parents, -1 first; siblings in draw order.
      kind: "replace" or "without": siblings are drawn with or without replacement.
        "point": they are chosen, the k-th child being the k-th token of ``draw``.
      draw: ``prefix -> [V]``, the law that children are drawn from; for "point" the
        tokens to choose, at least one for each child.
      live: ``(prefix, k) -> bool``: is the k-th child of this prefix drawn at all?
      vote: N booleans; None = all. False marks probe nodes.
      claim: ``prefix -> [V']``, the row that the block shows; None = ``draw``.
      to_target: ``[V']`` target ids of the claimed rows; None = the ids agree.
    """

    parent: Sequence[int]
    kind: str
    draw: Table
    live: Callable[[Prefix, int], bool] = lambda prefix, k: True
    vote: Sequence[bool] | None = None
    claim: Table | None = None
    to_target: Sequence[int] | None = None


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
    cases = _cases(target, draft, nodes, rows)
    axes = cases.token.shape[1] + 1
    which = np.arange(len(cases.chance))
    low = np.zeros((len(which), axes), np.float32)
    high = np.ones_like(low)
    random = np.random.default_rng(0)
    budget = _MOST_PIECES * len(which)
    codes, weights = [], []
    while len(which):
        budget -= len(which)
        if budget < 0:
            raise ValueError("the rule is not piecewise constant in its uniforms")
        inner = random.uniform(size=(2, *low.shape)).astype(np.float32)
        inside = np.minimum(low + inner * (high - low), np.nextafter(high, 0))
        found, axis, cut, code = _run(
            _explore(rule), cases, which, low, high, *inside
        )
        done = ~found
        codes.append(code[done])
        volume = np.prod((high - low)[done].astype(np.float64), -1)
        weights.append(volume * cases.chance[which[done]])
        low, high, which, axis, cut = (x[found] for x in (low, high, which, axis, cut))
        row = np.arange(len(which))
        below, above = high.copy(), low.copy()
        below[row, axis] = above[row, axis] = cut
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
    cases = _cases(target, draft, nodes, rows)
    vocab, length = cases.p.shape[-1], int(cases.depth.max()) + 1
    codes, weights = [], []
    for winners in np.ndindex(*[vocab] * length):
        race = np.ones((cases.rows, vocab), np.float32)
        weight = 1.0
        for d, y in enumerate(winners):
            p = np.asarray(target(winners[:d]), np.float32)
            race[d] = np.where(p > 0, p, 1)
            race[d, y] *= 1 - 1e-3
            weight *= float(p[y])
        if weight > 0:
            which = np.arange(len(cases.chance))
            races = np.broadcast_to(race, (len(which), *race.shape))
            codes.append(_run(_judge(rule), cases, which, races)[0])
            weights.append(weight * cases.chance)
    return _emission(target, cases, np.concatenate(codes), np.concatenate(weights))


# Drafts


class _Cases(NamedTuple):
    """Every draft of one scheme: ``chance [D]``, then what the rule sees of it."""

    chance: np.ndarray
    token: np.ndarray  # [D, N]
    live: np.ndarray  # [D, N]
    p: np.ndarray  # [D, N, V]
    q: np.ndarray | None  # [D, N, V']
    parent: np.ndarray  # [N]
    vote: np.ndarray  # [N]
    depth: np.ndarray  # [N]
    to_target: np.ndarray | None
    replace: bool
    rows: int


def drafts(draft: Draft) -> Iterator[tuple[float, Prefix, tuple[bool, ...]]]:
    """``(chance, tokens, lives)`` of every block; a dead node holds an arbitrary id."""
    parent, nodes = draft.parent, len(draft.parent)

    def extend(chance: float, token: Prefix, live: tuple[bool, ...]):
        i = len(token)
        if i == nodes:
            yield chance, token, live
            return
        older = [j for j in range(1, i) if parent[j] == parent[i]]
        prefix = _prefix(parent, token, parent[i])
        choice = {}
        if live[parent[i]] and draft.live(prefix, len(older)):
            choice = _choices(draft, prefix, [token[j] for j in older if live[j]])
        if not choice:
            yield from extend(chance, (*token, token[-1]), (*live, False))
        for x, q in choice.items():
            yield from extend(chance * q, (*token, x), (*live, True))

    return extend(1.0, (0,), (True,))


def _choices(draft: Draft, prefix: Prefix, older: list[int]) -> dict[int, float]:
    """Probability of every token that the next child can have, after ``older`` ones."""
    if draft.kind == "point":
        return {int(draft.draw(prefix)[len(older)]): 1.0}
    q = np.array(draft.draw(prefix), np.float64)
    if draft.kind == "without":
        q[older] = 0
    return {int(x): q[x] / q.sum() for x in np.flatnonzero(q)}


def _prefix(parent: Sequence[int], token: Prefix, node: int) -> Prefix:
    """Tokens on the path from the root, itself excluded, to ``node``."""
    return (*_prefix(parent, token, parent[node]), token[node]) if node > 0 else ()


def _cases(target: Table, draft: Draft, nodes: int, rows: int) -> _Cases:
    if draft.kind not in ("replace", "without", "point"):
        raise ValueError(f"unknown kind {draft.kind!r}")
    used = len(draft.parent)
    pad = max(0, nodes - used)
    # Dead nodes continue a chain, so that rules for chains meet one.
    parent = [*draft.parent, *range(used - 1, used - 1 + pad)]
    depth = [0]
    for v in parent[1:]:
        depth.append(depth[v] + 1)
    blocks = [
        (c, t + t[-1:] * pad, on + (False,) * pad) for c, t, on in drafts(draft)
    ]
    prefixes = [[_prefix(parent, t, i) for i in range(used)] for _, t, _ in blocks]

    def table(law: Table) -> np.ndarray:
        known = {x: np.asarray(law(x), np.float32) for b in prefixes for x in b}
        return np.stack([[known[x] for x in b + b[-1:] * pad] for b in prefixes])

    chance, token, live = (np.array(x) for x in zip(*blocks, strict=True))
    deepest = max(depth[:used])
    return _Cases(
        chance=chance,
        token=token.astype(np.int32),
        live=live,
        p=table(target),
        q=None if draft.kind == "point" else table(draft.claim or draft.draw),
        parent=np.array(parent, np.int32),
        vote=np.array([*(draft.vote or [True] * used), *[True] * pad]),
        depth=np.array(depth[:used]),
        to_target=None if draft.to_target is None else np.array(draft.to_target),
        replace=draft.kind != "without",
        rows=max(rows, deepest + 1),
    )


# Judging


def _run(f: Callable, cases: _Cases, which: np.ndarray, *arrays: np.ndarray):
    """``f`` on chunks of one size, with the drafts that ``which`` picks."""
    outs = []
    for start in range(0, len(which), _CHUNK):
        part = slice(start, start + _CHUNK)
        short = max(0, start + _CHUNK - len(which))

        def chunk(x, part=part, short=short):
            return np.concatenate([x[part], np.repeat(x[part][-1:], short, 0)])

        at = chunk(which)
        q = None if cases.q is None else cases.q[at]
        law = Law(q, cases.to_target, cases.replace)
        block = Block(cases.token[at], cases.parent, cases.live[at], cases.vote, law)
        out = f(block, cases.p[at], *map(chunk, arrays), rows=cases.rows)
        outs.append([np.asarray(x)[: _CHUNK - short] for x in out])
    out = [np.concatenate(x) for x in zip(*outs, strict=True)]
    if np.any(out[-1] < 0):
        raise ValueError("the rule left the block or the vocabulary")
    return out


_BATCH = Block(0, None, 0, None, 0)  # type: ignore[arg-type]


def _outcome(rule: Rule, noise: Noise, block: Block, p: Array, rows: int) -> Array:
    """Emitted tokens as one number, digits in base V + 1; -1 for an impossible verdict."""
    nodes, vocab = p.shape
    out = rule(noise, block, TargetLaw(p, jnp.argmax(p, -1).astype(jnp.int32)))
    step = jnp.arange(min(rows, nodes))
    path = out.path[: len(step)]
    after = jnp.append(path[1:], -1)
    child = jnp.maximum(after, 0)
    inside = step < out.n_accept
    allowed = block.live & block.vote & (after != 0)[:, None][:, 0][0]
    good = (block.parent[child] == path) & (block.live & block.vote)[child] & (after > 0)
    del allowed
    valid = (path[0] == 0) & jnp.all(jnp.where(inside, good, after == -1))
    valid &= (out.n_accept >= 0) & (out.n_accept < len(step))
    valid &= (out.next_token >= 0) & (out.next_token < vocab)
    token = jnp.where(inside, block.token[child], out.next_token)
    digit = jnp.where(step <= out.n_accept, token, vocab)
    return jnp.where(valid, jnp.sum(digit * (vocab + 1) ** step), -1)
