"""Routers and experts against loops that follow the papers word by word."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.models import moe
from jspec.models.config import Experts
from jspec.testing import tiny

M, WIDE = 16, 12
# These programs run once: compiling them is what takes the time.
QUICK = {"xla_backend_optimization_level": 0}
SOFTMAX = Experts(count=8, per_token=3, intermediate=WIDE)
ROUTERS = {
    "softmax": SOFTMAX,
    "unnormalised": dataclasses.replace(SOFTMAX, normalise=False, scale=2.0),
    "best-of-groups": dataclasses.replace(
        SOFTMAX, groups=4, groups_kept=2, normalise=False
    ),
    "sigmoid": dataclasses.replace(SOFTMAX, score="sigmoid", scale=2.5),
    "corrected": dataclasses.replace(
        SOFTMAX, score="sigmoid", scale=2.5, corrected=True, groups=4, groups_kept=2
    ),
    "all-groups": dataclasses.replace(
        SOFTMAX, score="sigmoid", corrected=True, groups=2, groups_kept=2
    ),
    "shared": dataclasses.replace(SOFTMAX, shared=2),
    "many": dataclasses.replace(SOFTMAX, count=32, per_token=4),
}


def config(experts):
    return tiny.config(hidden=M, experts=experts)


@functools.cache
def weights(experts):
    """Random weights, as large as makes every output of order 1."""
    rng = np.random.default_rng(0)

    def normal(key, *shape):
        del key
        return jnp.asarray(rng.normal(size=shape, scale=0.5), jnp.float32)

    keys = jax.random.split(jax.random.key(0), 4)
    return moe.init(config(experts), 0, keys, normal)


def inputs(rows):
    return np.random.default_rng(1).normal(size=(rows, M)).astype(np.float32)


def route(experts, params, x):
    out = jax.jit(moe.route, static_argnums=0, compiler_options=QUICK)(
        experts, params, x
    )
    return jax.tree.map(np.asarray, out)


def mixture(experts, params, x):
    run = jax.jit(moe.mixture, static_argnums=0, compiler_options=QUICK)
    return np.asarray(run(config(experts), params, x[None])[0])


def each(params, share, x, most):
    def run(params, share, x):
        return moe.each("silu", params, share, x, most=most)

    return jax.jit(run, compiler_options=QUICK)(params, share, x)


def all_at_once(params, share, x):
    def run(params, share, x):
        return moe.all_at_once("silu", params, share, x)

    return jax.jit(run, compiler_options=QUICK)(params, share, x)


def expected_route(experts, params, x):
    """``{expert: weight}`` of one row, in float64."""
    logit = np.asarray(params.router, np.float64) @ np.asarray(x, np.float64)
    if experts.score == "sigmoid":
        score = 1 / (1 + np.exp(-logit))
    else:
        score = np.exp(logit) / np.exp(logit).sum()
    rank = score.copy()
    if experts.corrected:
        rank += np.asarray(params.correction)
    size = experts.count // experts.groups
    groups = [range(g * size, (g + 1) * size) for g in range(experts.groups)]
    top = 2 if experts.corrected else 1
    groups.sort(key=lambda g: -sum(sorted(rank[list(g)])[-top:]))
    allowed = [e for g in groups[: experts.groups_kept] for e in g]
    chosen = sorted(allowed, key=lambda e: -rank[e])[: experts.per_token]
    total = score[chosen].sum() if experts.normalise else 1.0
    return {e: score[e] / total * experts.scale for e in chosen}


def expected_mlp(gate_up, down, x):
    gate, up = np.asarray(gate_up, np.float64) @ np.asarray(x, np.float64)
    return np.asarray(down, np.float64) @ (gate / (1 + np.exp(-gate)) * up)


def expected_mixture(experts, params, x):
    out, params = [], jax.tree.map(np.asarray, params)
    for row in x:
        shares = expected_route(experts, params, row)
        y = sum(
            share * expected_mlp(params.gate_up[e], params.down[e], row)
            for e, share in shares.items()
        )
        if experts.shared:
            y = y + expected_mlp(params.shared.gate_up, params.shared.down, row)
        out.append(y)
    return np.stack(out)


@pytest.mark.parametrize("name", ROUTERS)
def test_route_is_the_papers(name):
    experts, x = ROUTERS[name], inputs(20)
    params = weights(experts)
    chosen, share = route(experts, params, x)
    assert chosen.shape == share.shape == (20, experts.per_token)
    for i in range(20):
        expected = expected_route(experts, params, x[i])
        got = dict(zip(chosen[i].tolist(), share[i].tolist(), strict=True))
        assert got.keys() == expected.keys()
        for e, value in expected.items():
            assert got[e] == pytest.approx(value, rel=1e-5)


def test_groups_and_correction_matter_in_these_tests():
    x, params = inputs(20), weights(ROUTERS["corrected"])
    chosen = [
        np.sort(route(ROUTERS[name], p, x)[0])
        for name, p in [
            ("corrected", params),
            ("all-groups", params),
            ("sigmoid", params.replace(correction=None)),
        ]
    ]
    for i in (1, 2):
        assert (chosen[0] != chosen[i]).any()
    assert (chosen[1] != chosen[2]).any()


@pytest.mark.parametrize(
    "name, rows",
    [(n, r) for n in ROUTERS for r in (1, 30)] + [("many", 4), ("many", 5)],
)
def test_mixture_is_the_chosen_experts_sum(name, rows):
    experts, x = ROUTERS[name], inputs(rows)
    params = weights(experts)
    got = mixture(experts, params, x)
    expected = expected_mixture(experts, params, x)
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(got, expected, atol=2e-5)


def shares(experts, rows):
    """``share [E, R]`` with the given experts in use."""
    share = np.random.default_rng(2).uniform(0.5, 1, (SOFTMAX.count, rows))
    unused = [e for e in range(SOFTMAX.count) if e not in experts]
    share[unused] = 0
    return jnp.asarray(share, jnp.float32)


@pytest.mark.parametrize("used, most", [((2,), 1), ((0, 5, 7), 3), ((3, 4), 8)])
def test_both_forms_agree(used, most):
    params, x, share = weights(SOFTMAX), inputs(5), shares(used, 5)
    a, b = each(params, share, x, most), all_at_once(params, share, x)
    assert np.abs(a).max() > 1
    np.testing.assert_allclose(a, b, atol=2e-5)


def test_gradients_of_both_forms_agree():
    params, x, share = weights(SOFTMAX), inputs(5), shares((1, 6), 5)

    def gradient(form, **kwargs):
        def loss(params, share, x):
            return jnp.sum(form("silu", params, share, x, **kwargs) ** 2)

        return jax.jit(jax.grad(loss, (0, 1, 2)), compiler_options=QUICK)(
            params, share, x
        )

    a, b = gradient(moe.each, most=4), gradient(moe.all_at_once)
    assert max(np.abs(g).max() for g in jax.tree.leaves(a)) > 1
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("rows", [2, 20])
def test_a_bad_row_is_seen_and_spoils_no_other(rows):
    experts, x = ROUTERS["many"], inputs(rows)
    params = weights(experts)
    x[0, 0] = np.nan
    y = mixture(experts, params, x)
    assert np.isnan(y[0]).all()
    np.testing.assert_allclose(
        y[1:],
        expected_mixture(experts, params, x[1:]),
        atol=2e-5,
    )


def test_an_expert_that_overflows_does_not_reach_rows_that_did_not_choose_it():
    params, share = weights(SOFTMAX), shares((1, 2), 4).at[2, 0].set(0)
    params = params.replace(gate_up=params.gate_up.at[2].set(1e30))
    x = np.abs(inputs(4))
    for y in (each(params, share, x, 2), all_at_once(params, share, x)):
        assert np.isfinite(y[0]).all()
        assert not np.isfinite(y[1:]).any()


def test_weights_and_config_must_agree():
    with pytest.raises(ValueError, match="llama config has none"):
        moe.mixture(tiny.config(hidden=M), weights(SOFTMAX), jnp.ones((1, 2, M)))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"groups": 3}, "8 experts do not stand in 3 equal groups"),
        ({"groups": 0}, "in 0 equal groups"),
        ({"groups": 4, "groups_kept": 5}, "5 of 4 groups"),
        ({"groups": 8, "groups_kept": 8, "corrected": True}, "needs two to be ranked"),
        ({"groups": 4, "groups_kept": 1}, "3 experts a token, but 1 groups hold 2"),
        ({"per_token": 9}, "9 experts a token"),
        ({"per_token": 0}, "0 experts a token"),
    ],
)
def test_experts_refuse_what_cannot_be(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SOFTMAX, **change)


def test_the_first_layers_keep_their_kind():
    experts = dataclasses.replace(SOFTMAX, dense_layers=(0, 2))
    full = tiny.config(layers=3, experts=experts)
    assert [full.has_experts(i) for i in range(3)] == [False, True, False]
    cut = full.first(2)
    assert (cut.layers, len(cut.windows), len(cut.ropes)) == (2, 2, 2)
    assert cut.experts.dense_layers == (0,)
    assert tiny.config(layers=3).first(1) == tiny.config(layers=1)
