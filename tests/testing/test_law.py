"""The exact-law machinery: drafts, integration, battery, refusals."""

import jax.numpy as jnp
import numpy as np
import pytest
from biased_rules import ignores_draft, reused_uniform

from jspec import judging, verify
from jspec.testing import (
    CHAINS,
    TREES,
    Scheme,
    assert_lossless,
    battery,
    branching,
    emitted_law,
    one_hot_law,
    random_law,
    random_target,
    ranking,
)
from jspec.testing.enumeration import cases, drafts, merge
from jspec.testing.pieces import outcomes
from jspec.types import Law, Verdict

ONE = {"a chain of 1": branching(1)}
PAIR = {"two siblings": branching(2)}


# The integration


def test_drafts_are_drawn_as_told():
    q = random_law(0, zeros=1)
    p = q(())
    listed = {t[1:]: c for c, t, _ in drafts(Scheme(branching(2), "replace", q))}
    assert len(listed) == 9
    assert all(c == pytest.approx(p[x] * p[y]) for (x, y), c in listed.items())
    listed = {t[1:]: c for c, t, _ in drafts(Scheme(branching(2), "without", q))}
    assert len(listed) == 6
    for (x, y), c in listed.items():
        assert c == pytest.approx(p[x] * p[y] / (1 - p[x]))
    ((chance, token, live),) = drafts(Scheme(branching(2), "point", ranking(q)))
    assert chance == 1 and token[1:] == tuple(np.argsort(-p)[:2]) and all(live)


def test_spent_draws_and_early_stops_kill_nodes():
    q = random_law(0, zeros=3)  # a single token
    ((_, _, live),) = drafts(Scheme(branching(2), "without", q))
    assert live == (True, True, False)
    scheme = Scheme(branching(2, 1), "replace", random_law(0), lambda t, i: i != 1)
    assert {live for _, _, live in drafts(scheme)} == {(True, False, True, False, True)}
    assert sum(c for c, _, _ in drafts(scheme)) == pytest.approx(1)


@pytest.mark.parametrize("law", [random_law, random_target, one_hot_law])
def test_tables_are_laws(law):
    for seed in range(5):
        for prefix in ((), (1,), (3, 0)):
            p = law(seed)(prefix)
            assert p.dtype == np.float32 and p.shape == (4,)
            assert (p >= 0).all() and np.float64(p).sum() == 1


def test_two_thresholds_that_must_both_hold():
    """A corner is found that random points would miss, at its exact size."""

    def corner(noise, block, target):
        n = jnp.where((noise.accept[1] < 1e-3) & (noise.accept[2] >= 0.998), 2, 0)
        return judging.emit_chain(noise, block, n, target.p[n], target.p[n])

    out = emitted_law(
        corner, random_law(0), Scheme(branching(1, 1), "point", ranking(random_law(0)))
    )
    assert out.tokens - 1 == pytest.approx(2 * 1e-3 * 2e-3, rel=1e-3)


def test_integral_equals_simulation():
    """A biased and an exact rule against 200000 drafts and their verdicts."""
    target, q = random_law(4), random_law(5)
    scheme = Scheme(branching(1, 1), "replace", q)
    random = np.random.default_rng(0)
    blocks = cases(target, scheme)
    for rule in (verify.token, reused_uniform):
        exact = emitted_law(rule, target, scheme)
        n = 200_000
        which = random.choice(len(blocks.chance), n, p=blocks.chance)
        uniform = random.uniform(size=(n, 4)).astype(np.float32)
        race = np.ones((1, 3, 4), np.float32)
        code = outcomes(rule, blocks, Law(), which, uniform, race)
        digits = code[:, None] // 5 ** np.arange(3) % 5
        tokens = 1 + (digits[:, 1:] < 4).sum(-1)
        assert tokens.mean() == pytest.approx(
            exact.tokens, abs=4 * tokens.std() / n**0.5
        )
        first = np.bincount(digits[:, 0], minlength=4) / n
        np.testing.assert_allclose(first, exact.law.sum((1, 2)), atol=4 * 0.5 / n**0.5)


def test_impossible_verdicts_are_refused():
    scheme = Scheme(branching(1, 1), "replace", random_law(1), vote=[True, True, False])

    def giving(path, n_accept, next_token):
        def rule(noise, block, target):
            return Verdict(jnp.array(path), jnp.int32(n_accept), jnp.int32(next_token))

        return rule

    good = giving([0, 1, -1], 1, 3)
    assert emitted_law(good, random_law(0), scheme).tokens == 2
    for bad in (
        giving([0, 1, 2], 2, 3),  # a probe node
        giving([0, 2, -1], 1, 3),  # no child of the root
        giving([1, -1, -1], 0, 3),  # not from the root
        giving([0, 1, -1], 0, 3),  # another length
        giving([0, 1, -1], 1, 4),  # not in the vocabulary
        giving([0, 1, -1], 1, -1),
    ):
        with pytest.raises(ValueError, match="left the block or the vocabulary"):
            emitted_law(bad, random_law(0), scheme)


def test_rules_for_chains_are_refused_on_trees():
    with pytest.raises(ValueError, match="left the block"):
        assert_lossless(verify.token, shapes=PAIR, kinds=["point"])


def test_rules_without_pieces_are_refused():
    def ragged(noise, block, target):
        y = jnp.int32(noise.next * 2000) % 4
        return judging.verdict(block, jnp.int32(0), y)

    with pytest.raises(ValueError, match="not piecewise constant"):
        emitted_law(ragged, random_law(0), Scheme(branching(), "point", ranking))


def test_failure_names_shape_kind_case_and_distance():
    with pytest.raises(
        AssertionError,
        match=r"^ignores_draft is not lossless on a chain of 1, kind 'replace', plain, "
        r"seed 0: total variation 0\.\d+ > 1e-06$",
    ):
        assert_lossless(ignores_draft, shapes=ONE, kinds=["replace"])


def test_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="unknown kind 'top-k'"):
        emitted_law(verify.walk, random_law(0), Scheme(branching(), "top-k", ranking))


@pytest.mark.parametrize("kind", ["replace", "point"])
def test_battery_covers_every_shape_and_its_edges(kind):
    edges = {"early stop", "probe"}
    edges |= {"repeated token"} if kind == "point" else {"degenerate q"}
    names = battery(CHAINS | TREES, kind, (3, 4))
    for shape, parent in (CHAINS | TREES).items():
        for seed, limit in ((3, 5), (4, 4)):
            label = f"{shape}, kind {kind!r}, {{}}, seed {seed}"
            plain = seed == 3 or len(parent) <= 5
            assert (label.format("plain") in names) == plain
            for case in edges:
                assert (label.format(case) in names) == (1 < len(parent) <= limit)


def test_blocks_of_several_targets_merge():
    q = random_law(2, zeros=2)
    a = cases(random_law(0), Scheme(branching(1), "replace", q), nodes=3)
    b = cases(random_law(1), Scheme(branching(2), "replace", q))
    both = merge([a, b])
    assert both.token.shape == (2 + 4, 3) and both.q.shape == (6, 3, 4)
    assert not both.live[:2, 2].any() and both.live[2:].all()
