"""Every scheme known to be biased must fail the exact-law assertion."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from biased_rules import ignores_draft, reused_uniform

from jspec import judging, sampling, verify
from jspec.testing import (
    Scheme,
    assert_lossless,
    battery,
    branching,
    emitted_law,
    emitted_laws,
    raced_law,
    random_law,
    random_target,
    ranking,
)
from jspec.types import Law

ONE = {"a chain of 1": branching(1)}
TWO = {"a chain of 2": branching(1, 1)}
PAIR = {"two siblings": branching(2)}


# Biased rules. Each returns a verdict that a reader would take for a good one.


def off_by_one(noise, block, target):
    """Judges a token by the row after it."""
    p = jnp.roll(target.p, -1, 0)
    return verify.token(noise, block, target.replace(p=p))


def with_residual(residual):
    def rule(noise, block, target):
        out = verify.token(noise, block, target)
        p, q = target.p[out.n_accept], block.law.q[out.n_accept]
        live = jnp.append(block.live[1:], False)[out.n_accept]
        left = jnp.where(live, residual(p, q), p)
        return judging.emit_chain(noise, block, out.n_accept, p, left)

    return rule


softmax_residual = with_residual(lambda p, q: jax.nn.softmax(jax.nn.relu(p - q)))
no_residual = with_residual(lambda p, q: p)


def first_failure(noise, block, target):
    """Block verification that stops at its first failure."""

    def step(carry, i):
        budget, going = carry
        px, qx = target.p[i - 1, block.token[i]], block.law.q[i - 1, block.token[i]]
        budget = jnp.minimum(1, budget * px / qx)
        last = i == block.token.shape[0] - 1
        q = jnp.where(last, 0, block.law.q[i])
        mass = jnp.sum(jax.nn.relu(budget * target.p[i] - q))
        going &= block.live[i] & block.vote[i]
        going &= noise.accept[i] * (mass + 1 - budget) < mass
        return (budget, going), (budget, going)

    nodes = jnp.arange(1, block.token.shape[0])
    one = jnp.float32(1), jnp.bool_(True)
    _, (budget, kept) = jax.lax.scan(step, one, nodes)
    n = jnp.sum(kept, dtype=jnp.int32)
    last = n == block.token.shape[0] - 1
    spent = jnp.append(jnp.float32(1), budget)[n]
    left = jax.nn.relu(spent * target.p[n] - jnp.where(last, 0, block.law.q[n]))
    return judging.emit_chain(noise, block, n, target.p[n], left)


def token_budget(noise, block, target):
    """Block verification's residual after token-wise acceptance."""
    out = verify.token(noise, block, target)
    up = judging.parent(block)
    ratio = target.p[up, block.token] / block.law.q[up, block.token]
    budget = jnp.cumprod(jnp.minimum(1, ratio.at[0].set(1)))[out.n_accept]
    p, q = target.p[out.n_accept], block.law.q[out.n_accept]
    left = jnp.where(out.n_accept < block.token.shape[0] - 1, budget * p - q, p)
    return judging.emit_chain(noise, block, out.n_accept, p, jax.nn.relu(left))


def under(law):
    """``recursive`` as if the children had been drawn from another law."""

    def rule(noise, block, target):
        return verify.recursive(noise, block.replace(law=law(block, target)), target)

    return rule


def sharpened(block, target):
    """The softmax that chosen children were ranked by."""
    q = target.p**2 / jnp.sum(target.p**2, -1, keepdims=True)
    return Law(q, replace=False)


never_updated = under(lambda block, _: dataclasses.replace(block.law, replace=True))
top_k_as_drawn = under(sharpened)


def sorted_siblings(noise, block, target):
    """Judges the likelier of two siblings first."""
    q = block.law.q[0, block.token]
    swap = (q[2] > q[1]) & jnp.all(block.live & block.vote)
    order = jnp.where(swap, jnp.array([0, 2, 1]), jnp.arange(3))
    out = verify.recursive(noise, block.replace(token=block.token[order]), target)
    path = jnp.where(out.path > 0, order[out.path], out.path)
    return out.replace(path=path)


def sample_per_row(noise, block, target):
    """Every path row has target samples of its own; the longest match wins."""
    up = judging.parent(block)
    y = jax.vmap(sampling.draw)(noise.accept, target.p[up])
    node = judging.deepest(block, judging.eligible(block) & (y == block.token))
    return judging.emit(noise, block, node, target.p[node], target.p[node])


BIASED = [
    (ignores_draft, TWO, "replace"),
    (reused_uniform, ONE, "replace"),
    (off_by_one, TWO, "replace"),
    (softmax_residual, ONE, "replace"),
    (no_residual, ONE, "replace"),
    (first_failure, TWO, "replace"),
    (token_budget, TWO, "replace"),
    (never_updated, PAIR, "without"),
    (sorted_siblings, PAIR, "without"),
    (sample_per_row, PAIR, "point"),
]


@pytest.mark.parametrize(("rule", "shapes", "kind"), BIASED)
def test_biased_rules_are_caught(rule, shapes, kind):
    pairs = [
        (random_target(seed), next(iter(battery(shapes, kind, [seed]).values()))[1])
        for seed in range(4)
    ]
    distance = [out.distance for out in emitted_laws(rule, pairs)]
    assert max(distance) > 5e-3, distance
    with pytest.raises(AssertionError, match="is not lossless on"):
        assert_lossless(rule, shapes=shapes, kinds=[kind], seeds=range(4))


def test_top_k_children_judged_as_drawn_are_caught():
    pairs = []
    for seed in range(4):
        target = random_law(seed)
        pairs.append((target, Scheme(branching(2), "point", ranking(target))))
    distance = [out.distance for out in emitted_laws(top_k_as_drawn, pairs)]
    assert min(distance) > 0.04
    assert max(out.distance for out in emitted_laws(verify.recursive, pairs)) < 2e-7


@pytest.mark.parametrize("rule", [verify.recursive, verify.traversal])
def test_pruning_drawn_trees_by_score_is_caught(rule):
    """Of two draws the likelier is kept, and judged as one draw."""

    def best_of_two(q):
        def law(prefix):
            p = np.float64(q(prefix))
            below = np.array([p[p < x].sum() for x in p])
            return 2 * p * below + p**2

        return law

    pairs = []
    for seed in range(4):
        q = random_law(seed + 1000, zeros=1)
        scheme = Scheme(branching(2), "replace", best_of_two(q), claim=q)
        pairs.append((random_law(seed), scheme))
        assert best_of_two(q)(()).sum() == pytest.approx(1)
    assert max(out.distance for out in emitted_laws(rule, pairs)) > 0.02


def skip_repeated(noise, block, target):
    """Drops the second of two equal draws without a trial."""
    live = judging.distinct(block, block.live)
    return verify.recursive(noise, block.replace(live=live), target)


def test_skipping_repeated_draws_is_caught():
    found = [
        emitted_law(
            skip_repeated,
            random_law(seed),
            Scheme(branching(3), "replace", random_law(seed + 1000, zeros=1)),
        ).distance
        for seed in range(4)
    ]
    assert max(found) > 2e-3


def test_races_of_another_law_or_depth_are_caught():
    def wrong_depth(noise, block, target):
        return verify.coupled(noise.replace(race=noise.race[::-1]), block, target)

    def unweighted(noise, block, target):
        p = jnp.where(target.p > 0, 0.25, 0.0)
        return verify.coupled(noise, block, target.replace(p=p))

    scheme = Scheme(branching(1, 1), "point", ranking(random_law(0)))
    assert raced_law(verify.coupled, random_law(0), scheme).distance < 1e-12
    for rule in (wrong_depth, unweighted):
        assert raced_law(rule, random_law(0), scheme).distance > 0.05
