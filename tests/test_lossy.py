"""Lossy rules: they are not lossless, and do what their papers say."""

import functools

import jax
import numpy as np
import pytest

from jspec import lossy, verify
from jspec.testing import (
    Scheme,
    assert_lossless,
    branching,
    emitted_law,
    emitted_laws,
    random_law,
)
from jspec.types import POINT_MASS, Block, Law, Noise, TargetLaw

NODES, VOCAB = 4, 4


def test_they_are_reached_through_verify():
    assert verify.lossy is lossy


@pytest.mark.parametrize("rule", [lossy.typical(), lossy.lenient(0.7)])
def test_they_are_not_lossless(rule):
    with pytest.raises(AssertionError, match="rule is not lossless on a chain of 1"):
        shapes = {"a chain of 1": branching(1)}
        assert_lossless(rule, shapes=shapes, kinds=["replace"])


@pytest.mark.parametrize(
    "make",
    [
        lambda: lossy.typical(epsilon=0),
        lambda: lossy.typical(delta=-1),
        lambda: lossy.lenient(0),
        lambda: lossy.lenient(1.1),
    ],
)
def test_bad_thresholds_are_refused(make):
    with pytest.raises(ValueError, match="must be"):
        make()


def chain_of_one(seed):
    q = random_law(seed + 1000, zeros=1)
    return random_law(seed), Scheme(branching(1), "replace", q)


def test_lenient_law_is_the_papers():
    """Kept: ``min(q, p / l)``; corrected: the rest by ``normalise(relu(p - l q))``."""
    pairs = [chain_of_one(seed) for seed in range(3)]
    for (target, scheme), out in zip(
        pairs, emitted_laws(lossy.lenient(0.6), pairs), strict=True
    ):
        p, q = (np.float64(t(())) for t in (target, scheme.draw))
        kept = np.minimum(q, p / 0.6)
        left = np.maximum(p - 0.6 * q, 0)
        first = kept + (1 - kept.sum()) * left / left.sum()
        np.testing.assert_allclose(out.law.sum(-1), first, atol=1e-6)
        assert (first <= p / 0.6 + 1e-9).all()
        assert out.tokens == pytest.approx(1 + kept.sum(), abs=1e-6)
        assert out.distance > 0.01


def test_lenient_by_one_is_exact():
    target, scheme = chain_of_one(0)
    out = emitted_law(lossy.lenient(1), target, scheme)
    assert out.distance < 2e-7
    assert out.tokens == pytest.approx(emitted_law(verify.token, target, scheme).tokens)


@functools.cache
def compiled(rule):
    return jax.jit(rule)


def judge(rule, token, parent, p, law=POINT_MASS, accept=0.5, vote=None):
    on = np.ones(NODES, bool)
    block = Block(
        np.array(token, np.int32),
        np.array(parent, np.int32),
        on,
        on if vote is None else np.array(vote),
        law,
    )
    p = np.asarray(p, np.float32)
    noise = Noise(
        np.full(NODES, accept, np.float32),
        np.float32(0.5),
        np.ones((NODES, VOCAB), np.float32),
    )
    target = TargetLaw(p, np.argmax(p, -1).astype(np.int32))
    out = compiled(rule)(noise, block, target)
    return out.path.tolist(), int(out.n_accept), int(out.next_token)


CHAIN, TREE = [-1, 0, 1, 2], [-1, 0, 0, 1]
FLAT = [0.25, 0.25, 0.25, 0.25]


def test_lenient_point_masses():
    """A chosen token is kept with ``p / factor``."""
    rule = lossy.lenient(0.5)
    p = [[0.3, 0.1, 0.1, 0.5]] * 4
    assert judge(rule, [0] * 4, CHAIN, p, accept=0.59) == ([0, 1, 2, 3], 3, 3)
    # Of token 0 nothing is left, since p < 0.5: the rest is (0, 1, 1, 5) / 7.
    assert judge(rule, [0] * 4, CHAIN, p, accept=0.61) == ([0, -1, -1, -1], 0, 3)


typical = lossy.typical()


def test_typical_threshold():
    """``min(epsilon, delta exp(-H))``: for a flat law of four, min(.09, .3 / 4)."""
    assert judge(typical, [0, 1, 1, 1], CHAIN, [FLAT] * 4)[1] == 3
    for share, kept in ((0.088, 0), (0.092, 1)):  # H is low: epsilon decides
        p = [[1 - share, share, 0, 0]] + [[1, 0, 0, 0]] * 3
        assert judge(typical, [0, 1, 1, 1], CHAIN, p)[1] == kept
    strict = lossy.typical(epsilon=1, delta=1)  # exp(-H) of a flat law is 1 / 4
    higher, lower = ([0.25 + d, 0.25 - d, 0.25, 0.25] for d in (0.01, -0.01))
    assert judge(strict, [0, 0, 0, 0], CHAIN, [higher] * 4)[1] == 3
    assert judge(strict, [0, 0, 0, 0], CHAIN, [lower] * 4)[1] == 0


def test_typical_takes_the_longest_then_the_likeliest_path():
    p = [[0.1, 0.5, 0.4, 0], [0.7, 0.3, 0, 0], FLAT, FLAT]
    # Node 3, a child of the less likely node 1, makes the longer path.
    assert judge(typical, [0, 2, 1, 1], TREE, p) == ([0, 1, 3, -1], 2, 0)
    # Both children of the root are typical and have no children that are.
    p[1] = [1, 0, 0, 0]
    assert judge(typical, [0, 2, 1, 1], TREE, p) == ([0, 2, -1, -1], 1, 0)


def test_typical_keeps_no_probe_and_adds_the_best_token():
    p = [[0.1, 0.2, 0.7, 0]] * 4
    vote = [True, False, True, True]
    assert judge(typical, [0, 2, 1, 2], TREE, p, vote=vote) == ([0, 2, -1, -1], 1, 2)
    assert judge(typical, [0, 3, 3, 3], TREE, p) == ([0, -1, -1, -1], 0, 2)


def test_typical_reads_no_law_and_no_noise():
    p = np.random.default_rng(0).dirichlet(np.ones(4), 4)
    law = Law(np.full((NODES, VOCAB), np.nan, np.float32))
    token = [0, 1, 2, 1]
    found = judge(typical, token, TREE, p)
    assert judge(typical, token, TREE, p, law) == found
    assert judge(typical, token, TREE, p, accept=0.99) == found
