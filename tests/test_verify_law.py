"""Accept rules: exact emitted laws and identities of expected tokens."""

import functools
import itertools

import numpy as np
import pytest

from jspec import verify
from jspec.testing import (
    CHAINS,
    TREES,
    Scheme,
    assert_lossless,
    battery,
    branching,
    emitted_law,
    emitted_laws,
    one_hot_law,
    raced_laws,
    random_law,
    ranking,
)
from jspec.testing.enumeration import drafts

CHAIN_RULES = ("token", "block")
TREE_RULES = ("walk", "recursive", "traversal")
DENSE = ("replace", "without")
# How siblings were drawn is the same to rules for chains, and to one that reads no q.
EXACT = [(r, k) for r in (*CHAIN_RULES, "walk") for k in ("replace", "point")] + [
    (r, k) for r in ("recursive", "traversal") for k in (*DENSE, "point")
]


@functools.cache
def emissions(name, kind):
    """Exact emission of every case of the battery."""
    shapes = CHAINS if name in CHAIN_RULES else CHAINS | TREES
    cases = battery(shapes, kind)
    laws = emitted_laws(verify.LOSSLESS[name], list(cases.values()))
    return dict(zip(cases, laws, strict=True))


@pytest.mark.parametrize(("name", "kind"), EXACT)
def test_emitted_law_is_the_targets(name, kind):
    distance = {case: out.distance for case, out in emissions(name, kind).items()}
    assert max(distance.values()) < 2e-7, distance


def test_coupled_emits_the_winners_of_the_races():
    assert_lossless(verify.coupled, kinds=["without", "point"], laws=raced_laws)


def test_greedy_is_exact_at_temperature_zero():
    assert_lossless(verify.greedy, kinds=["without", "point"], target=one_hot_law)


def test_greedy_is_not_exact_above_temperature_zero():
    with pytest.raises(AssertionError, match="greedy is not lossless on the empty"):
        assert_lossless(verify.greedy, shapes=CHAINS, kinds=["point"])


@pytest.mark.parametrize(
    ("name", "mapped"),
    [("token", False), ("block", True), ("traversal", True)],
)
def test_smaller_draft_vocabulary(name, mapped):
    """Rows of 3 ids over a target of 4, by a map out of order or as its first ids."""
    to_target = [2, 0, 3] if mapped else [0, 1, 2]
    inner = random_law(7, vocab=3)

    def draw(prefix):
        row = np.zeros(4, np.float32)
        row[to_target] = inner(prefix)
        return row

    shape = branching(1, 1) if name in CHAIN_RULES else branching(2, 1)
    scheme = Scheme(shape, "without", draw, claim=inner)
    out = emitted_law(
        verify.LOSSLESS[name],
        random_law(1),
        scheme._replace(to_target=to_target if mapped else None),
    )
    assert out.distance < 2e-7
    assert out.tokens > 1.2


# Expected tokens


def tokens(name, kind, shape, seed=0):
    case = f"{shape}, kind {kind!r}, plain, seed {seed}"
    return emissions(name, kind)[case].tokens


def chain_tokens(gamma, seed, step):
    """``1 + sum E_q[budget]`` with ``budget = step(budget, p / q)`` along a chain."""
    p = random_law(seed, zeros=seed % 2)
    q = random_law(seed + 1000, zeros=1)
    total = 1.0
    for chance, token, _ in drafts(Scheme(branching(*[1] * gamma), "replace", q)):
        budget = 1.0
        for i in range(1, gamma + 1):
            x, prefix = token[i], token[1:i]
            budget = step(budget, float(p(prefix)[x]) / float(q(prefix)[x]))
            total += chance * budget
    return total


@pytest.mark.parametrize(("gamma", "seed"), [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0)])
def test_tokens_of_chains(gamma, seed):
    shape = f"a chain of {gamma}"
    token = chain_tokens(gamma, seed, lambda budget, ratio: budget * min(1, ratio))
    block = chain_tokens(gamma, seed, lambda budget, ratio: min(1, budget * ratio))
    found = {
        name: tokens(name, "replace", shape, seed)
        for name in ("token", "block", "recursive", "traversal")
    }
    assert found["token"] == pytest.approx(token, abs=1e-6)
    assert found["recursive"] == pytest.approx(token, abs=1e-6)
    assert found["block"] == pytest.approx(block, abs=1e-6)
    assert found["traversal"] == pytest.approx(block, abs=1e-6)
    if gamma > 1 and seed == 0:
        assert block > token + 1e-3


@pytest.mark.parametrize("kind", DENSE)
def test_traversal_accepts_more_than_recursive(kind):
    recursive = emissions("recursive", kind)
    gains = [
        out.tokens - recursive[case].tokens
        for case, out in emissions("traversal", kind).items()
    ]
    assert min(gains) > -1e-6
    assert max(gains) > 0.01


def test_recursive_accepts_more_than_walk():
    for case, out in emissions("walk", "replace").items():
        if "degenerate" not in case:  # where walk may still use the tokens
            assert emissions("recursive", "replace")[case].tokens > out.tokens - 1e-6


@pytest.mark.parametrize("shape", [*CHAINS, *TREES])
def test_tokens_of_chosen_trees_are_the_probability_of_their_paths(shape):
    p, q = random_law(0), random_law(1000, zeros=1)
    parent = {**CHAINS, **TREES}[shape]
    ((_, token, _),) = drafts(Scheme(parent, "point", ranking(q)))
    reach, prefix = [1.0], [()]
    for x, v in zip(token[1:], parent[1:], strict=True):
        reach.append(reach[v] * float(p(prefix[v])[x]))
        prefix.append((*prefix[v], x))
    for name in TREE_RULES:
        assert tokens(name, "point", shape) == pytest.approx(sum(reach), abs=1e-6)


def best_acceptance(p, joint):
    """``1 + min_H P(H) - Q(H)`` over sets H of tokens (Hu et al. 2502.18779)."""
    vocab = len(p)
    gap = []
    for size in range(vocab + 1):
        for h in itertools.combinations(range(vocab), size):
            inside = sum(c for c, drawn in joint if set(drawn) <= set(h))
            gap.append(sum(float(p[x]) for x in h) - inside)
    return 1 + min(gap)


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("seed", [0, 1])
def test_one_level_stays_below_the_bound_of_all_rules(kind, seed):
    p = random_law(seed, zeros=seed % 2)
    q = random_law(seed + 1000, zeros=1)
    joint = [(c, t[1:]) for c, t, _ in drafts(Scheme(branching(3), kind, q))]
    bound = best_acceptance(p(()), joint)
    for name in ("recursive", "traversal"):
        found = tokens(name, kind, "the tree (3,)", seed) - 1
        overlap = float(np.minimum(p(()), q(())).sum())
        assert overlap - 1e-6 < found < bound + 1e-6
    one = tokens("recursive", kind, "a chain of 1", seed) - 1
    assert one == pytest.approx(overlap, abs=1e-6)


@pytest.mark.parametrize("name", ["token", "block", "traversal", "recursive"])
def test_perfect_and_disjoint_drafts(name):
    p = random_law(3)
    scheme = Scheme(branching(1, 1, 1), "replace", p)
    if name not in CHAIN_RULES:  # the same with three dead nodes, as compiled before
        scheme = scheme._replace(parent=[-1, 0, 1, 2, 0, 0, 0], live=lambda _, i: i < 4)
    out = emitted_law(verify.LOSSLESS[name], p, scheme)
    assert out.tokens == pytest.approx(4, abs=1e-5)

    def half(prefix, wanted):
        row = np.where(np.arange(4) % 2 == wanted, p(prefix), 0)
        return np.round(row / row.sum() * 4096) / 4096

    target, draft = (functools.partial(half, wanted=w) for w in (0, 1))
    out = emitted_law(verify.LOSSLESS[name], target, scheme._replace(draw=draft))
    assert out.tokens == pytest.approx(1, abs=1e-6)
    assert out.distance < 2e-7
