"""Laws and draws against plain numpy, exact breakpoints and simple properties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec import sampling as smp

LAST = np.nextafter(np.float32(1), np.float32(0))
INF = np.inf


def make(batch=1, vocab=12, eos_ids=(2,), **kwargs):
    return smp.options(batch, vocab_size=vocab, eos_ids=eos_ids, **kwargs)


def normal(seed, shape, scale=2.0):
    return np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32)


def softmax(z):
    e = np.exp(z - np.max(z, -1, keepdims=True))
    return e / np.sum(e, -1, keepdims=True)


# Draws

draws = jax.jit(jax.vmap(smp.draw, (0, None)))
target_law = jax.jit(smp.target_law)


def breakpoints(p):
    """For every id the least float32 ``u`` in [0, 1] whose draw is at or above it."""
    ids = np.arange(len(p))
    low = np.zeros(len(p), np.int32)
    high = np.full(len(p), np.float32(1).view(np.int32))
    for _ in range(31):
        middle = (low + high) // 2
        reached = np.asarray(draws(middle.view(np.float32), p)) >= ids
        low, high = np.where(reached, low, middle + 1), np.where(reached, middle, high)
        high = high.astype(np.int32)
        low = np.minimum(low, high).astype(np.int32)
    return high.view(np.float32)


@pytest.mark.parametrize("vocab", [1, 2, 7, 256, 257, 1000])
@pytest.mark.parametrize("sharpness", [0.0, 1.0, 4.0])
def test_draw_has_the_law_within_1e_6(vocab, sharpness):
    p = softmax(normal(vocab, vocab, sharpness).astype(np.float64))
    p[np.random.default_rng(1).random(vocab) < 0.3] = 0
    p[vocab // 2] += 0.1
    p /= p.sum()
    edge = np.append(breakpoints(jnp.asarray(3 * p, jnp.float32)), 1.0)
    np.testing.assert_allclose(np.diff(edge), p, rtol=0, atol=1e-6)


def test_draw_of_ten_thousand_ids_passes_chi_square():
    p = softmax(normal(0, 10_000, 1.0))
    count = np.zeros(10_000)
    for key in jax.random.split(jax.random.key(0), 10):
        u = jax.random.uniform(key, (20_000,))
        count += np.bincount(draws(u, p), minlength=10_000)
    expected = 200_000 * p.reshape(100, 100).sum(1)
    chi2 = np.sum((count.reshape(100, 100).sum(1) - expected) ** 2 / expected)
    assert chi2 < 149  # 99 degrees of freedom: 1 in 1000


def test_bfloat16_logits_are_cast_up_before_the_law():
    z = jnp.zeros((1, 10_000), jnp.bfloat16)
    q = smp.draft_law(z, make(vocab=10_000, temperature=1.0))
    assert q.dtype == jnp.float32
    u = jax.random.uniform(jax.random.key(1), (20_000,))
    count = np.bincount(np.asarray(draws(u, q[0])) // 1000, minlength=10)
    assert np.sum((count - 2000) ** 2 / 2000) < 27.9  # 9 degrees of freedom: 1 in 1000


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.sampled_from([0.0, 1e-38, 1e-9, 1e-4, 0.3, 1.0]), min_size=3),
    st.floats(0, float(LAST), width=32),
)
def test_draw_never_returns_an_id_without_mass(weights, u):
    p = np.zeros(600, np.float32)
    p[np.arange(len(weights)) * 7 % 600] = weights
    if p.max() < 1e-20:
        p[300] = 1
    u = np.asarray([0, u, 0.5, LAST, 1.0], np.float32)
    assert np.all(p[np.asarray(draws(u, p))] > 0)


@pytest.mark.parametrize("bad", [0.0, np.nan])
def test_draw_of_a_degenerate_row_stays_in_the_vocabulary(bad):
    for vocab in (5, 300):
        p = np.full(vocab, bad, np.float32)
        ids = np.asarray(draws(np.asarray([0, 0.5, LAST], np.float32), p))
        assert np.all((ids >= 0) & (ids < vocab))
    p[3] = 1.0
    assert int(smp.draw(jnp.float32(0.5), jnp.asarray(p))) == 3


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("vocab", [1, 5, 256, 300, 1024])
def test_argmax_is_the_first_maximum_and_finds_a_nan(vocab, platform, monkeypatch):
    monkeypatch.setattr(smp.pallas, "platform", lambda: platform)
    z = np.round(normal(0, (3, 4, vocab)))
    z[0, 0] = -INF
    z[0, 1, vocab // 2] = INF
    z[1, 2, vocab // 3 :] = np.nan
    found = jax.jit(lambda z: smp.argmax(z))(z)  # not traced yet
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, jnp.argmax(z, -1))
    assert np.isnan(z[1, 2, found[1, 2]])


def test_a_fault_shows_in_the_raw_logit_of_the_best_token():
    z = normal(0, (1, 4, 3000))
    z[0, 0, 1400], z[0, 1], z[0, 2, 2999] = np.nan, -INF, INF
    law = target_law(z, make(vocab=3000, temperature=0.5, top_p=0.9))
    top = np.take_along_axis(z, np.asarray(law.best)[..., None], -1)[0, :, 0]
    np.testing.assert_array_equal(np.isfinite(top), [False, False, False, True])
    np.testing.assert_array_equal(np.isfinite(law.p[0, :, 0]), np.isfinite(top))


# Laws


def reference_law(z, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """transformers' warpers in float64; of tied values the lower ids stay."""
    z = (z / np.float32(temperature)).astype(np.float64)
    if top_k:
        z[z < np.sort(z)[-min(top_k, len(z))]] = -INF
    if top_p < 1:
        order = np.argsort(-z, kind="stable")[::-1]
        drop = order[np.cumsum(softmax(z)[order]) <= 1 - top_p]
        z[drop[drop != order[-1]]] = -INF
    p = softmax(z)
    z[p < min_p * p.max()] = -INF
    return softmax(z)


CUTS = [
    {},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 3000},
    {"top_k": 10**9},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_p": 1e-6},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8},
    {"top_k": 2500, "top_p": 0.97, "min_p": 0.01},
]


def spread(vocab):
    """Rows that are sharp, medium and flat, and the first two of them with ties."""
    z = normal(5, (5, vocab), 1.0) * np.asarray([6, 3, 0.3, 3, 1])[:, None]
    z[3:] = np.round(z[3:] * 4) / 4
    return z.astype(np.float32)


@pytest.mark.parametrize("vocab", [12, 1000, 20_000])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_target_law_truncates_as_transformers_does(cut, vocab):
    z = spread(vocab)
    o = make(vocab=vocab, temperature=0.8, **cut)
    law = target_law(z[None], o)
    np.testing.assert_array_equal(law.best[0], np.argmax(z, -1))
    for row, p in zip(z, law.p[0], strict=True):
        want = reference_law(row, 0.8, **cut)
        np.testing.assert_array_equal(p > 0, want.astype(np.float32) > 0)
        np.testing.assert_allclose(p, want, rtol=2e-5, atol=1e-7)


def test_top_p_at_an_exact_boundary_keeps_the_crossing_token_only():
    z = jnp.log(jnp.asarray([[[0.25, 0.5, 0.25], [0.125, 0.625, 0.25]]]))
    p = target_law(z, make(vocab=3, temperature=1.0, top_p=0.75)).p[0]
    np.testing.assert_allclose(p, [[1 / 3, 2 / 3, 0], [0, 5 / 7, 2 / 7]], rtol=1e-6)


def test_rows_of_a_mixed_batch_equal_their_singles():
    vocab = 3000
    z = spread(vocab)[:, None]
    rows = [
        {"temperature": 0.0, "top_p": 0.5},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.0, "top_p": 0.95},
        {"temperature": 1.3, "top_k": 7},
        {"temperature": 1.0, "min_p": 0.1},
    ]
    names = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    mixed = {n: [row.get(n, off) for row in rows] for n, off in names.items()}
    together = target_law(z, make(5, vocab, **mixed))
    for i, row in enumerate(rows):
        alone = target_law(z[i : i + 1], make(1, vocab, **row))
        np.testing.assert_array_equal(together.p[i] > 0, alone.p[0] > 0)
        np.testing.assert_allclose(together.p[i], alone.p[0], rtol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1e-6])
def test_no_temperature_and_hardly_any_are_greedy(temperature):
    z = normal(2, (1, 4, 50))
    law = target_law(z, make(vocab=50, temperature=temperature, top_k=3, top_p=0.9))
    np.testing.assert_array_equal(law.p[0], np.eye(50)[np.argmax(z[0], -1)])


def test_draft_law_is_the_target_law_of_one_row():
    z = normal(3, (2, 40))
    o = make(2, 40, temperature=[0.0, 0.9], top_k=4)
    law = smp.target_law(z[:, None], o)
    np.testing.assert_array_equal(smp.draft_law(jnp.asarray(z), o), law.p[:, 0])


@pytest.mark.parametrize("temperature", [[0.0, 0.0], [0.0, 0.9]])
def test_a_draft_is_drawn_from_the_draft_law(temperature):
    z = jnp.asarray(normal(3, (2, 40)))
    o = make(2, 40, temperature=temperature, top_k=4)
    keys = jax.random.split(jax.random.key(5), 2)
    token, q = jax.jit(smp.draft)(z, keys, o)
    np.testing.assert_allclose(q, smp.draft_law(z, o), rtol=1e-6)
    u = jax.vmap(jax.random.uniform)(keys)
    np.testing.assert_array_equal(token, jax.vmap(smp.draw)(u, q))


def test_padding_of_the_vocabulary_never_wins():
    z = normal(0, (1, 2, 16))
    z[..., 12:] = 100.0
    assert smp.mask_padding(z, 16) is z
    z = smp.mask_padding(jnp.asarray(z), 12)
    for temperature in (0.0, 5.0):
        law = target_law(z, make(vocab=12, temperature=temperature))
        assert np.all(law.best < 12)
        assert np.all(law.p[..., 12:] == 0)
        ids = draws(np.asarray([0, 0.99, LAST], np.float32), law.p[0, 0])
        assert np.all(np.asarray(ids) < 12)


def test_log_prob_is_the_log_softmax():
    z = jnp.asarray(normal(0, (2, 3, 40)), jnp.bfloat16)
    token = np.arange(6).reshape(2, 3)
    want = jax.nn.log_softmax(z.astype(jnp.float32))
    want = np.take_along_axis(np.asarray(want), token[..., None], -1)[..., 0]
    np.testing.assert_allclose(smp.log_prob(z, token), want, rtol=1e-5)
