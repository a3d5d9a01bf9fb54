"""Stops, budgets, capacity, options and bad input, driven by drafters that know."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec import drafters, verify
from jspec.prefill import fill_cache
from jspec.testing import scripted, tiny

GAMMA = 4
MODEL = tiny.model(seed=3)
VOCAB = MODEL.target.config.vocab_size
PROMPT = [1, 2, 3]
PLAIN = jspec.generate(MODEL, None, [PROMPT], max_new_tokens=40).tokens[0]
TEXT = [PROMPT + PLAIN]
ORACLE = scripted.oracle(TEXT, GAMMA, VOCAB)


def first_at(index):
    """A token id of the plain continuation whose first occurrence is at ``index``."""
    assert PLAIN[index] not in PLAIN[:index], "choose another seed for the model"
    return PLAIN[index]


FRESH = [i for i in range(12) if PLAIN[i] not in PLAIN[:i]]


@pytest.mark.parametrize("index", FRESH)
@pytest.mark.parametrize("draft", [None, ORACLE], ids=["plain", "oracle"])
def test_an_accepted_eos_ends_the_row_at_any_block_index(index, draft):
    eos = (first_at(index), VOCAB - 1)  # two ids end a row; one never occurs first
    request = jspec.prepare(MODEL, draft, [PROMPT], max_new_tokens=40, eos_ids=eos)
    state = request.run(request.prefill(), jnp.int32(100))
    assert int(state.length[0]) == len(PROMPT) + index + 1
    assert int(state.cache.length[0]) == int(state.length[0]) - 1
    stream = jspec.stream(
        MODEL, draft, [PROMPT], max_new_tokens=40, eos_ids=eos, log_prob=True
    )
    streamed = [t for delta in stream for t in delta.tokens]
    out = stream.output
    assert streamed == out.tokens[0] == PLAIN[: index + 1]
    assert out.finish_reason == ["eos"]
    assert len(out.log_prob[0]) == index + 1
    assert out.stats.new_tokens == index + 1


@pytest.mark.parametrize("new", range(1, GAMMA + 4))
@pytest.mark.parametrize("draft", [ORACLE, jspec.Draft(drafters.ngram(3, 3, 1))])
def test_the_budget_is_exact(new, draft):
    out = jspec.generate(MODEL, draft, [PROMPT], max_new_tokens=new)
    assert out.tokens[0] == PLAIN[:new]
    assert out.finish_reason == ["length"]
    assert out.stats.accepted <= out.stats.proposed
    assert out.stats.new_tokens == new


def test_rows_with_different_room_share_a_batch():
    text = TEXT * 3
    request = jspec.prepare(
        MODEL, scripted.oracle(text, GAMMA, VOCAB), [PROMPT] * 3, max_new_tokens=20
    )
    state = request.prefill()
    state = state.replace(limit=state.start + jnp.array([1, 2, GAMMA + 1]))
    state = request.run(state, jnp.int32(50))
    assert (state.length - state.start).tolist() == [1, 2, GAMMA + 1]


@pytest.mark.parametrize("short", [1, 2, GAMMA, GAMMA + 1])
def test_the_context_may_be_filled_to_its_last_slot(short):
    slots = 20
    prompt = TEXT[0][: slots - short]
    out = jspec.generate(MODEL, ORACLE, [prompt], max_new_tokens=100, slots=slots)
    assert prompt + out.tokens[0] == TEXT[0][:slots]
    assert out.finish_reason == ["length"]


def test_a_wrong_drafter_near_the_end_of_the_context():
    wrong = scripted.wrong(TEXT, GAMMA, VOCAB)
    out = jspec.generate(MODEL, wrong, [PROMPT], max_new_tokens=100, slots=16)
    assert PROMPT + out.tokens[0] == TEXT[0][:16]


@pytest.mark.parametrize("length", [1, 2, 32, 33, 34, 65, 130])
@pytest.mark.parametrize("copies", [1, 33])  # scored at once, and in chunks
def test_prompt_lengths_around_the_prefill_chunk(length, copies):
    prompt = [(7 * i) % VOCAB for i in range(length)]
    plain = jspec.generate(MODEL, None, [prompt] * copies, max_new_tokens=8).tokens[-1]
    logits = MODEL.target.score(
        MODEL.params,
        MODEL.target.init_cache(1, 1, jnp.float32),
        jspec.chain(jnp.array([prompt + plain])),
    ).logits[0]
    greedy = np.argmax(np.asarray(logits), -1)
    assert greedy[length - 1 : -1].tolist() == plain
    mixed = scripted.mixture([prompt + plain] * copies, GAMMA, VOCAB, seed=length)
    out = jspec.generate(MODEL, mixed, [prompt] * copies, max_new_tokens=8)
    assert out.tokens[0] == plain


@pytest.mark.parametrize("seed", range(3))
def test_a_sliding_window_with_rejections_at_every_offset(seed):
    model = tiny.model(seed=5, windows=(8, None))
    prompt = [1, 2, 3, 4, 5, 6]
    plain = jspec.generate(model, None, [prompt], max_new_tokens=40).tokens[0]
    mixed = scripted.mixture([prompt + plain], GAMMA, VOCAB, seed=seed)
    request = jspec.prepare(model, mixed, [prompt], max_new_tokens=40)
    state = request.run(request.prefill(), jnp.int32(100))
    assert state.tokens[0, 6:46].tolist() == plain
    fresh, _ = fill_cache(
        model.target, model.params, state.tokens, state.length, slots=state.cache.slots
    )
    n = int(state.cache.length[0])
    for got, want in zip(state.cache.k, fresh.k, strict=True):
        np.testing.assert_allclose(got[..., :n], want[..., :n], atol=1e-5)


def test_a_windowed_drafter():
    small = tiny.model(seed=5, windows=(4, 4))
    draft = jspec.load_drafter(small, MODEL, gamma=3)
    out = jspec.generate(MODEL, draft, [PROMPT], max_new_tokens=40)
    assert out.tokens[0] == PLAIN


def test_calls_do_not_remember_each_other():
    draft = jspec.Draft(drafters.ngram(GAMMA, 3, 1))
    other = [9, 8, 9, 8, 9]
    runs = [
        jspec.generate(MODEL, draft, [p], max_new_tokens=20).tokens
        for p in (PROMPT, other, PROMPT, PROMPT)
    ]
    assert runs[0] == runs[2] == runs[3]


def test_capacity_does_not_change_the_drafts():
    draft = jspec.Draft(drafters.ngram(GAMMA, 3, 1))
    outs = [
        jspec.generate(MODEL, draft, [PROMPT], max_new_tokens=30, slots=s)
        for s in (40, 100, 129, 300)
    ]
    assert len({tuple(o.tokens[0]) for o in outs}) == 1
    assert len({o.stats.accepted for o in outs}) == 1


OPTIONS = {
    "repetition": dict(repetition_penalty=1.5),
    "presence": dict(presence_penalty=1.5),
    "frequency": dict(frequency_penalty=1.0),
    "bias": dict(logit_bias={PLAIN[0]: -100.0, PLAIN[3]: 3.0}),
    "forbidden": dict(forbidden_tokens=[PLAIN[0], PLAIN[1]]),
    "forced": dict(forced_tokens={0: 7, 5: 9}),
    "min-new": dict(min_new_tokens=9, eos_ids=PLAIN[2:6]),
    "all": dict(
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        forbidden_tokens=[PLAIN[0]],
        min_new_tokens=4,
        eos_ids=(PLAIN[1],),
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_act_on_every_drafted_token(name):
    """Speculation under penalties equals the plain loop under penalties."""
    options = dict(max_new_tokens=24, **OPTIONS[name])
    plain = jspec.generate(MODEL, None, [PROMPT], **options)
    if name != "min-new":
        assert plain.tokens[0] != PLAIN[: len(plain.tokens[0])]
    text = [PROMPT + plain.tokens[0]]
    for draft in (
        scripted.oracle(text, GAMMA, VOCAB),
        scripted.mixture(text, GAMMA, VOCAB),
    ):
        out = jspec.generate(MODEL, draft, [PROMPT], **options)
        assert out.tokens == plain.tokens
        assert out.finish_reason == plain.finish_reason
    assert out.stats.tau > 1


def test_log_probs_are_those_of_the_plain_model():
    out = jspec.generate(
        MODEL, ORACLE, [PROMPT], max_new_tokens=12, log_prob=True, temperature=0.0
    )
    whole = jnp.array([PROMPT + out.tokens[0]])
    cache = MODEL.target.init_cache(1, 1, jnp.float32)
    logits = MODEL.target.score(MODEL.params, cache, jspec.chain(whole)).logits[0]
    expected = jax.nn.log_softmax(logits)[jnp.arange(2, 14), whole[0, 3:15]]
    np.testing.assert_allclose(out.log_prob[0], expected, atol=1e-5)


def test_a_mixed_batch_equals_its_singles():
    """Seeds, temperatures and truncations of the neighbours do not matter."""
    options = dict(
        temperature=[0.0, 1.0, 0.7, 1.3],
        top_k=[0, 5, 0, 0],
        top_p=[1.0, 1.0, 0.8, 1.0],
        seed=[1, 2, 3, 2],
    )
    draft = jspec.load_drafter(tiny.model(seed=4), MODEL, gamma=3)
    common = dict(max_new_tokens=16, rule=verify.block)
    whole = jspec.generate(MODEL, draft, [PROMPT] * 4, **common, **options)
    for row in range(4):
        mine = {k: [v[row]] for k, v in options.items()}
        one = jspec.generate(MODEL, draft, [PROMPT], **common, **mine)
        assert one.tokens[0] == whole.tokens[row]
    assert whole.tokens[0] == PLAIN[:16]


RULES = {
    "token": (verify.token, True),
    "block": (verify.block, True),
    "recursive": (verify.recursive, True),
    "traversal": (verify.traversal, True),
    "walk": (verify.walk, False),
    "coupled": (verify.coupled, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_the_law_of_two_tokens_through_the_whole_loop(name):
    """Chi-square of the first two sampled tokens, at a temperature and a top-k."""
    rule, dense = RULES[name]
    vocab, rows = 5, 2000
    model = tiny.model(seed=1, vocab_size=vocab)
    options = dict(temperature=0.7, top_k=4)
    if dense:
        draft = jspec.load_drafter(tiny.model(seed=2, vocab_size=vocab), model, gamma=2)
    else:
        draft = jspec.Draft(drafters.ngram(2, 3, 1))
    prompt = [1, 2, 1, 2]
    out = jspec.generate(
        model,
        draft,
        [prompt] * rows,
        max_new_tokens=3,
        rule=rule,
        seed=list(range(rows)),
        **options,
    )
    counts = np.zeros((vocab, vocab))
    for tokens in out.tokens:
        counts[tokens[0], tokens[1]] += 1
    expected = rows * _pair_law(model, prompt, vocab, **options)
    assert (counts[expected == 0] == 0).all()
    real = expected > 0
    chi = ((counts[real] - expected[real]) ** 2 / expected[real]).sum()
    assert float(jax.scipy.stats.chi2.sf(chi, int(real.sum()) - 1)) > 1e-4
    assert out.stats.accepted > 0


def _pair_law(model, prompt, vocab, temperature, top_k):
    def law(ids):
        cache = model.target.init_cache(len(ids), 1, jnp.float32)
        out = model.target.score(model.params, cache, jspec.chain(jnp.array(ids)))
        z = np.asarray(out.logits[:, -1], np.float64) / temperature
        z[z < np.sort(z, -1)[:, -top_k][:, None]] = -np.inf
        p = np.exp(z - z.max(-1, keepdims=True))
        return p / p.sum(-1, keepdims=True)

    one = law([prompt])[0]
    return one[:, None] * law([[*prompt, t] for t in range(vocab)])


def test_changed_options_do_not_recompile():
    draft = jspec.load_drafter(tiny.model(seed=4), MODEL, gamma=2)
    common = dict(max_new_tokens=8, rule=verify.token)
    jspec.generate(MODEL, draft, [PROMPT], temperature=0.5, **common)
    before = jspec.run._cache_size()
    jspec.generate(
        MODEL,
        draft,
        [PROMPT],
        temperature=1.5,
        top_k=7,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        logit_bias={3: 1.0},
        seed=9,
        **common,
    )
    assert jspec.run._cache_size() == before


def test_a_nan_in_the_logits_names_row_and_position():
    """The embedding of one emitted token is NaN: nothing after it can be judged."""
    index = FRESH[3]
    embed = MODEL.params.embed.at[PLAIN[index]].set(jnp.nan)
    sick = dataclasses.replace(MODEL, params=MODEL.params.replace(embed=embed))
    other = [t for t in range(VOCAB) if t not in PLAIN][:1]
    healthy = jspec.generate(MODEL, None, [other], max_new_tokens=4).tokens[0]
    text = [other + healthy, TEXT[0]]
    message = f"row 1 after {len(PROMPT) + index + 1} tokens"
    for draft in (None, scripted.oracle(text, GAMMA, VOCAB)):
        request = jspec.prepare(sick, draft, [other, PROMPT], max_new_tokens=30)
        limit = np.array([len(other) + 1, len(PROMPT) + 30])
        stream = jspec.Stream(dataclasses.replace(request, limit=limit), None)
        with pytest.raises(FloatingPointError, match=message):
            list(stream)


BAD = {
    "no prompts": (dict(prompts=[]), "no prompts"),
    "empty prompt": (dict(prompts=[[]]), "prompt 0 is empty"),
    "second prompt empty": (dict(prompts=[[1], []]), "prompt 1 is empty"),
    "id outside": (dict(prompts=[[1, VOCAB]]), f"token id {VOCAB}"),
    "text without tokenizer": (dict(prompts="hello"), "no tokenizer"),
    "too long": (dict(prompts=[[1] * 30], slots=30), "30 tokens"),
    "beyond the model": (dict(prompts=[[1]], slots=4096), "ends at 512"),
    "gamma beyond cache": (
        dict(prompts=[[1]], slots=4, drafter=drafters.ngram(gamma=8)),
        "gamma is 8",
    ),
    "no new tokens": (dict(prompts=[[1]], max_new_tokens=0), "max_new_tokens is 0"),
    "unknown option": (dict(prompts=[[1]], topp=0.9), "top_p"),
    "temperature": (dict(prompts=[[1]], temperature=-1.0), "temperature"),
    "top-p": (dict(prompts=[[1]], top_p=1.5), "top_p"),
    "stop without tokenizer": (dict(prompts=[[1]], stop="x"), "tokenizer"),
    "chat without tokenizer": (dict(prompts=["x"], chat=True), "no tokenizer"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    arguments, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        jspec.prepare(MODEL, **{"drafter": None, **arguments})


def test_something_that_is_no_drafter():
    with pytest.raises(TypeError, match="str"):
        jspec.prepare(MODEL, "ngram", [[1]])


def test_an_unread_stream_has_no_output():
    stream = jspec.stream(MODEL, None, [[1]])
    with pytest.raises(RuntimeError, match="not ended"):
        _ = stream.output
    with pytest.raises(ValueError, match="rounds is 0"):
        jspec.stream(MODEL, None, [[1]], rounds=0)


def test_stopping_a_stream_early_leaves_nothing_behind():
    stream = iter(jspec.stream(MODEL, ORACLE, [PROMPT], max_new_tokens=20))
    next(stream)
    stream.close()
    out = jspec.generate(MODEL, ORACLE, [PROMPT], max_new_tokens=20)
    assert out.tokens[0] == PLAIN[:20]


def test_half_precision_cache_equals_plain_with_the_same_cache():
    half = dataclasses.replace(MODEL, dtype=jnp.dtype(jnp.bfloat16))
    plain = jspec.generate(half, None, [PROMPT], max_new_tokens=16)
    text = [PROMPT + plain.tokens[0]]
    out = jspec.generate(
        half, scripted.mixture(text, GAMMA, VOCAB), [PROMPT], max_new_tokens=16
    )
    assert out.tokens == plain.tokens
