"""The independent draft model: its cache, its law, its checks."""

import jax.numpy as jnp
import pytest

import jspec
from jspec import drafters, verify
from jspec.testing import scripted, tiny

MODEL = tiny.model(seed=3)
VOCAB = MODEL.target.config.vocab_size


def test_the_target_as_its_own_drafter_is_always_right():
    draft = jspec.load_drafter(MODEL, MODEL, gamma=3)
    out = jspec.generate(MODEL, draft, [[1, 2, 3]], max_new_tokens=40)
    assert out.stats.acceptance_by_depth == (1.0, 1.0, 1.0)
    hot = dict(max_new_tokens=40, temperature=1.0, rule=verify.token)
    out = jspec.generate(MODEL, draft, [[1, 2, 3]], **hot)
    assert out.stats.acceptance_by_depth == (1.0, 1.0, 1.0)


def test_acceptance_returns_after_forced_rejections():
    """The draft cache survives rejections: nothing is trimmed twice."""
    draft = jspec.load_drafter(MODEL, MODEL, gamma=3)
    request = jspec.prepare(MODEL, draft, [[1, 2, 3]], max_new_tokens=60)

    def never(noise, block, law):
        dead = block.replace(live=jnp.arange(block.live.shape[0]) == 0)
        return verify.greedy(noise, dead, law)

    state = request.prefill()
    forced = jspec.prepare(MODEL, draft, [[1, 2, 3]], max_new_tokens=60, rule=never)
    state = forced.run(state, jnp.int32(10))
    assert int(state.length[0]) == 3 + 10
    state = request.run(state, jnp.int32(5))
    assert state.emitted[0, 10:15].tolist() == [4] * 5


def test_tokens_that_others_drafted_are_read_before_the_next_draft():
    """After rounds of another drafter the model is as right as ever."""
    copier = jspec.Draft(drafters.ngram(2, 1, 1), name="ngram")
    draft = drafters.fallback(copier, jspec.load_drafter(MODEL, MODEL, gamma=3))
    request = jspec.prepare(MODEL, draft, [[1, 2, 3]], max_new_tokens=60, eos_ids=())
    state = request.run(request.prefill(), jnp.int32(14))
    proposed = state.proposed[0, :14].tolist()
    emitted = state.emitted[0, :14].tolist()
    pairs = list(zip(proposed, emitted, strict=True))
    assert {n for p, n in pairs if p == 3} == {4}
    first = proposed.index(2)  # a round of the other one, with more of ours after it
    assert 3 in proposed[first:]


def test_a_nan_draft_falls_back_to_the_target():
    bad = tiny.model(seed=4)
    params = bad.params.replace(final_norm=bad.params.final_norm * jnp.nan)
    draft = jspec.Draft(
        drafters.small_model(bad.target, VOCAB, gamma=2), params, "nan", VOCAB
    )
    plain = jspec.generate(MODEL, None, [[1, 2, 3]], max_new_tokens=12)
    out = jspec.generate(MODEL, draft, [[1, 2, 3]], max_new_tokens=12)
    assert out.tokens == plain.tokens
    hot = dict(max_new_tokens=12, temperature=1.0, seed=5, rule=verify.block)
    out = jspec.generate(MODEL, draft, [[1, 2, 3]], **hot)
    assert out.stats.accepted == 0
    assert all(0 <= t < VOCAB for t in out.tokens[0])


def test_a_model_with_other_tokens_is_refused():
    with pytest.raises(ValueError, match="vocabulary of 50"):
        jspec.load_drafter(tiny.model(vocab_size=50), MODEL)


def test_a_drafter_of_another_target_is_refused():
    draft = scripted.oracle([[1, 2]], 2, vocab_size=50)
    with pytest.raises(ValueError, match="50 tokens"):
        jspec.generate(MODEL, draft, [[1]])


def test_gamma_below_one_is_refused():
    with pytest.raises(ValueError, match="gamma is 0"):
        jspec.load_drafter(MODEL, MODEL, gamma=0)
