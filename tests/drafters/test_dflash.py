"""What block-diffusion drafters are made of, piece by piece."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jspec
from jspec import cache as kv_cache
from jspec import sampling, types
from jspec.drafters import block_reach, dflash, diffusion, dspark
from jspec.testing import tiny
from jspec.train.block_starts import fresh_dflash, with_markov, with_selector

VOCAB = 23
MODEL = tiny.model(seed=4, vocab_size=VOCAB, layers=3)
ROWS, T = 5, 11
KEY = jax.random.key(0)
FEATURES = jax.random.normal(KEY, (2, T, 2 * 32))


def fresh(ids=None, layers=2):
    return fresh_dflash(MODEL, (1, 2), ids, 22, KEY, layers=layers, block=ROWS)


def noisy(tree, size=0.5):
    leaves, form = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(9), len(leaves) + 1)
    moved = [
        x + size * jax.random.normal(k, x.shape) if x.dtype == jnp.float32 else x
        for x, k in zip(leaves, keys, strict=False)
    ]
    return jax.tree.unflatten(form, moved)


def spark(link=dspark.rnn, ids=None):
    head = with_markov(fresh(ids), KEY, 6, link)
    return head.design, noisy(head.weights)


def empty(design, batch=2):
    c = design.config
    return kv_cache.init(c.layers, batch, c.kv_heads, c.head_dim, 20, jnp.float32)


def injected(design, weights, features, parts, batch=2):
    """A cache of ``features [B, T, F]``, added in parts of these sizes."""
    cache, at = empty(design, batch), 0
    for size in parts:
        # Rows behind those that count: what was drafted and refused.
        part = features[:, at : at + size + 2]
        path = jnp.broadcast_to(jnp.arange(part.shape[1]), part.shape[:2])
        count = jnp.full(batch, size)
        cache = dflash.inject(design, weights, cache, part, path, count)
        at += size
    return cache


def test_injection_in_parts_is_injection_at_once():
    head = fresh()
    design, weights = head.design, noisy(head.weights, 0.1)
    anchor = jnp.array([3, 7])
    whole = injected(design, weights, FEATURES, [T])
    parts = injected(design, weights, FEATURES, [4, 1, 3, 3])
    assert whole.length.tolist() == parts.length.tolist() == [T, T]
    a, b = (
        diffusion.forward(design, weights, cache, anchor, ROWS)
        for cache in (whole, parts)
    )
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    other = diffusion.forward(
        design, weights, injected(design, weights, FEATURES[::-1], [T]), anchor, ROWS
    )
    assert np.abs(a - other).max() > 1e-2


def test_what_lies_behind_the_context_is_never_read():
    head = fresh()
    design, weights = head.design, head.weights
    cache = injected(design, weights, FEATURES, [4])
    dirty = cache.replace(
        k=tuple(jnp.where(jnp.arange(20) >= 4, 1e3, k) for k in cache.k),
        v=tuple(jnp.where(jnp.arange(20)[:, None] >= 4, -1e3, v) for v in cache.v),
    )
    anchor = jnp.array([3, 7])
    a, b = (diffusion.forward(design, weights, c, anchor, ROWS) for c in (cache, dirty))
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("causal", [False, True])
def test_rows_see_all_rows_unless_causal(causal):
    """Gradients from every row to every row's input; each row sees itself and the first."""
    head = fresh()
    design = dataclasses.replace(head.design, causal=(causal, causal))
    weights = noisy(head.weights, 0.1)
    cache = injected(design, weights, FEATURES[:1], [4], batch=1)
    x = diffusion.embedded(design, weights, jnp.array([[3, 22, 22, 22, 22]]))
    attend = block_reach.decoding(design, cache, ROWS)
    position = 4 + jnp.arange(ROWS)[None]

    def out(x):
        return diffusion.body(design, weights, x, position, attend)[0].sum(-1)

    slope = np.abs(jax.jacobian(out)(x)[:, 0]).sum(-1) > 1e-7
    expected = np.tri(ROWS, dtype=bool) if causal else np.ones((ROWS, ROWS), bool)
    np.testing.assert_array_equal(slope, expected)


REACH = {  # window 3, block at 6 of three rows: which of slots 0 .. 5, and of the block
    "by_row": ([[4, 5], [5], []], [[0, 1, 2], [0, 1, 2], [0, 1, 2]]),
    "context_only": ([[4, 5], [5], []], [[0, 1, 2], [0, 1, 2], [0, 1, 2]]),
    "by_anchor": ([[3, 4, 5]] * 3, [[0, 1, 2]] * 3),
}


@pytest.mark.parametrize("name", REACH)
def test_windows(name):
    reach = getattr(block_reach, name)
    context, block = reach(3, jnp.array(6), jnp.arange(6), 3)
    seen, near = REACH[name]
    assert [np.flatnonzero(row).tolist() for row in context] == seen
    assert [np.flatnonzero(row).tolist() for row in block] == near
    _, near = reach(2, jnp.array(6), jnp.arange(6), 3)
    narrow = [[0, 1], [0, 1, 2], [1, 2]] if name == "by_row" else [[0, 1, 2]] * 3
    assert [np.flatnonzero(row).tolist() for row in near] == narrow


def options(batch, temperature):
    return sampling.options(
        batch, vocab_size=VOCAB, eos_ids=(), temperature=temperature
    )


@pytest.mark.parametrize("link", dspark.LINKS.values())
def test_tokens_drawn_in_turn_are_judged_as_given_ones(link):
    """At temperature 0 every token is the best of the logits along its own path."""
    ids = jnp.asarray([0, 3, 4, 8, 9, 15, 20])  # draft ids are not target ids
    design, weights = spark(link, np.asarray(ids))
    hidden = jax.random.normal(KEY, (2, 4, 32))
    anchor, keys = jnp.array([5, 20]), jax.random.split(KEY, 2)
    drafts = dspark.left_to_right(
        design, weights, hidden, anchor, keys, options(2, 0.0)
    )
    path = jnp.concatenate([anchor[:, None], ids[drafts.token[:, :-1]]], 1)
    z, e = dspark.codes(link, weights.joint, path, hidden)
    corrected = diffusion.logits(design, weights, hidden) + z @ weights.joint.after.T
    assert drafts.token.tolist() == jnp.argmax(corrected, -1).tolist()
    chance = jax.nn.sigmoid(dspark.doubt(weights, hidden, e))
    np.testing.assert_allclose(drafts.confidence, chance, rtol=1e-5)
    assert len({*np.asarray(drafts.confidence).ravel().tolist()}) == 8


def test_without_a_view_dspark_is_dflash():
    head = with_markov(fresh(), KEY, 6, dspark.vanilla)  # W2 begins at zero
    hidden = jax.random.normal(KEY, (2, 4, 32))
    anchor, keys = jnp.array([5, 20]), jax.random.split(KEY, 2)
    law = dspark.left_to_right(
        head.design, head.weights, hidden, anchor, keys, options(2, 1.0)
    ).law
    plain = dflash.independent(
        head.design, head.weights, hidden, anchor, keys, options(2, 1.0)
    ).law
    np.testing.assert_allclose(law, plain, rtol=1e-5)


def drawn(head, count, **changes):
    """Drafts of ``count`` copies of one row, and the law that they say they have."""
    design, weights = head
    hidden = jnp.broadcast_to(jax.random.normal(KEY, (1, 3, 32)), (count, 3, 32))
    keys = jax.random.split(jax.random.key(3), count)
    anchor = jnp.full(count, 5)
    return design.choose(design, weights, hidden, anchor, keys, options(count, 1.2))


CHOICES = {
    "independent": lambda: (fresh().design, fresh().weights),
    "selector": lambda: (
        with_selector(fresh(), KEY, 6, count=4).design,
        noisy(with_selector(fresh(), KEY, 6, count=4).weights),
    ),
    "dspark": spark,
}


@pytest.mark.parametrize("name", CHOICES)
def test_tokens_have_the_law_that_is_said(name):
    """Each row's tokens, counted among draws that agree on the tokens before."""
    drafts = drawn(CHOICES[name](), 6000)
    token, law = np.asarray(drafts.token), np.asarray(drafts.law, np.float64)
    np.testing.assert_allclose(law.sum(-1), 1, atol=1e-5)
    same = np.ones(len(token), bool)
    for k in range(2):
        q = law[same, k]
        np.testing.assert_allclose(q, np.broadcast_to(q[0], q.shape), atol=1e-5)
        seen = np.bincount(token[same, k], minlength=VOCAB)
        assert (q[0][seen > 0] > 0).all()
        expected = q[0] * same.sum()
        common = expected >= 5
        gaps = (seen - expected)[common] ** 2 / expected[common]
        assert gaps.sum() < stats.chi2.ppf(0.999, max(common.sum() - 1, 1))
        same &= token[:, k] == np.argmax(np.bincount(token[same, k]))


def test_a_draft_lives_or_dies_before_it_is_drawn():
    """Blocks that agree on the first k drafts agree on whether the next one lives."""
    design, weights = spark()
    tokens = jnp.broadcast_to(jnp.arange(T), (400, T))
    tokens = tokens.at[:, -1].set(jnp.arange(400) % VOCAB)
    features = jnp.broadcast_to(FEATURES[:1], (400, T, 64))
    given = types.Context(tokens, jnp.full(400, T), options(400, 1.5), features)
    keys = jax.random.split(jax.random.key(4), 400)

    def proposed(least):
        draft = dflash.drafter(design, 4, rows=ROWS, least=least)
        state = draft.init(weights, given)
        return jax.jit(draft.propose)(weights, state, keys, given)

    sure = np.asarray(proposed(0.0)[1].confidence)
    least = float(np.quantile(sure, 0.3))
    block, state = proposed(least)
    np.testing.assert_allclose(state.confidence, sure, rtol=1e-6)
    token, live = np.asarray(block.token), np.asarray(block.live)
    np.testing.assert_array_equal(live[:, 1:], np.cumprod(sure >= least, 1) > 0)
    assert 0.05 < live[:, 1:].mean() < 0.95
    by_prefix: dict[tuple, set] = {}
    for row, alive in zip(token, live, strict=True):
        for k in range(1, 5):
            by_prefix.setdefault((k, *row[:k]), set()).add(bool(alive[k]))
    assert all(len(found) == 1 for found in by_prefix.values())
    assert len(by_prefix) < 4 * 400  # prefixes do come more than once


def test_a_mask_or_a_tap_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="mask token 23 is not in the vocabulary"):
        fresh_dflash(MODEL, (1, 2), None, 23, KEY)
    with pytest.raises(ValueError, match="after 0 to 2 of them"):
        fresh_dflash(MODEL, (1, 3), None, 22, KEY)
    with pytest.raises(ValueError, match="4 layers of tiny, which has 3"):
        fresh_dflash(MODEL, (1, 2), None, 22, KEY, layers=4)


def test_a_drafter_with_fewer_rows_keeps_the_text():
    head = fresh()
    prompts = [[1, 2, 3], [4]]
    plain = jspec.generate(MODEL, None, prompts, max_new_tokens=12, eos_ids=())
    drafter = dflash.drafter(head.design, 2, dense=False)
    draft = jspec.Draft(drafter, head.weights)
    assert not drafter.shape.dense
    ours = jspec.generate(MODEL, draft, prompts, max_new_tokens=12, eos_ids=())
    assert ours.tokens == plain.tokens
