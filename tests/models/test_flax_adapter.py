"""Flax modules as targets: exact by recomputation, with every kind of block."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jspec
from jspec.drafters import ngram, small_model
from jspec.drafters.draft import Draft
from jspec.models.flax_adapter import FlaxConfig, from_linen, from_nnx, target
from jspec.testing import scripted
from jspec.types import Block, chain

V, M, HEADS, LONGEST = 23, 24, 3, 64
CONFIG = FlaxConfig(vocab_size=V, max_position=LONGEST)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7, 7], [11, 2, 11, 2, 11]]
NEW = 20


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.qkv = nnx.Linear(M, 3 * M, rngs=rngs)
        self.out = nnx.Linear(M, M, rngs=rngs)

    def __call__(self, x, mask):
        batch, width, _ = x.shape
        qkv = self.qkv(x).reshape(batch, width, 3, HEADS, M // HEADS)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        scores = jnp.einsum("bihd,bjhd->bhij", q, k) / (M // HEADS) ** 0.5
        scores = jnp.where(mask[:, None], scores, -jnp.inf)
        a = jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(scores), v)
        return x + self.out(a.reshape(batch, width, M))


class LM(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(1.0)
        self.embed = nnx.Embed(V, M, embedding_init=normal, rngs=rngs)
        self.place = nnx.Embed(LONGEST, M, embedding_init=normal, rngs=rngs)
        self.first, self.second = Attention(rngs), Attention(rngs)
        self.head = nnx.Linear(M, V, rngs=rngs)

    def __call__(self, tokens, positions, mask):
        x = self.embed(tokens) + self.place(positions)
        return self.head(jnp.tanh(self.second(self.first(x, mask), mask)))


class TappedLM(LM):
    def __call__(self, tokens, positions, mask, taps=()):
        logits = super().__call__(tokens, positions, mask)
        embedded = self.embed(tokens) + self.place(positions)
        return (logits, embedded) if taps == (0,) else logits


def model_of(module, config=CONFIG):
    functions, params = from_nnx(module, config)
    return jspec.Model("flax", functions, params, None, jnp.dtype(jnp.float32))


MODULE = LM(nnx.Rngs(0))
MODEL = model_of(MODULE)


def forward(ids):
    """Logits ``[T, V]`` of a plain causal forward."""
    causal = jnp.tril(jnp.ones((1, len(ids), len(ids)), bool))
    return MODULE(jnp.asarray([ids]), jnp.arange(len(ids))[None], causal)[0]


@pytest.fixture(scope="module")
def naive():
    """Greedy continuations by a loop over whole forwards."""

    @jax.jit
    def step(ids, length):  # causality hides the padding
        return jnp.argmax(forward(ids)[length - 1])

    texts = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(NEW):
            padded = ids + [0] * (LONGEST - len(ids))
            ids.append(int(step(padded, len(ids))))
        texts.append(ids)
    assert len({tuple(t[-NEW:]) for t in texts}) == len(texts)
    assert all(len(set(t[-NEW:])) > 3 for t in texts)
    return texts


def new_tokens(texts):
    return [t[-NEW:] for t in texts]


def test_greedy_is_the_naive_loop_and_a_batch_is_its_singles(naive):
    whole = jspec.generate(MODEL, None, PROMPTS, max_new_tokens=NEW)
    assert whole.tokens == new_tokens(naive)
    for prompt, tokens in zip(PROMPTS, whole.tokens, strict=True):
        single = jspec.generate(MODEL, None, prompt, max_new_tokens=NEW)
        assert single.tokens == [tokens]


def test_any_drafter_leaves_greedy_output_alone(naive):
    drafts = {
        "ngram": ngram(gamma=4),
        "mixture": scripted.mixture(naive, 3, V, seed=1),
        "oracle": scripted.oracle(naive, 3, V),
        "small model": Draft(small_model(MODEL.target, V, gamma=2), MODEL.params),
    }
    for name, draft in drafts.items():
        out = jspec.generate(MODEL, draft, PROMPTS, max_new_tokens=NEW)
        assert out.tokens == new_tokens(naive), name
        if name in ("oracle", "small model"):
            assert out.stats.tau > 2, name


def test_context_filled_to_its_last_position():
    prompt = PROMPTS[0]
    plain = jspec.generate(MODEL, None, prompt, max_new_tokens=200)
    assert len(plain.tokens[0]) == LONGEST - len(prompt)
    draft = scripted.mixture([prompt + plain.tokens[0]], 5, V, seed=2)
    out = jspec.generate(MODEL, draft, prompt, max_new_tokens=200)
    assert out.tokens == plain.tokens


def filled(ids, slots=16):
    """A cache of ``ids``, with rubbish in the dead slots."""
    cache = MODEL.target.init_cache(1, slots, jnp.float32)
    cache = cache.replace(tokens=cache.tokens + V - 1)
    block = chain(jnp.asarray([ids]))
    path = jnp.arange(len(ids))[None]
    out = MODEL.target.score(MODEL.params, cache, block, rows="none")
    assert out.logits.shape == (1, 0, V)
    return cache.append(out.kv, path, jnp.asarray([len(ids)]))


def test_rows_of_a_tree_are_those_of_its_chains():
    prefix, token = [3, 1, 4, 1], [5, 6, 7, 8, 9, 10]
    parent = [-1, 0, 0, 1, 2, 3]
    block = Block(
        token=jnp.asarray([token]),
        parent=jnp.asarray([parent]),
        live=jnp.ones((1, 6), bool),
        vote=jnp.ones((1, 6), bool),
    )
    cache = filled(prefix)
    out = MODEL.target.score(MODEL.params, cache, block)
    for leaf, path in {5: [0, 1, 3, 5], 4: [0, 2, 4]}.items():
        text = prefix + [token[node] for node in path]
        expected = forward(text)[len(prefix) :]
        chex.assert_trees_all_close(
            out.logits[0, jnp.asarray(path)], expected, atol=1e-5
        )
        ids = jnp.asarray([[*path, -1]])
        kept = cache.append(out.kv, ids, jnp.asarray([len(path)]))
        assert kept.tokens[0, : kept.length[0]].tolist() == text, leaf
    assert cache.crop(8).slots == 8
    assert int(kept.rewind(jnp.asarray([2])).length[0]) == 2


def test_rows_pick_what_all_returns():
    block = chain(jnp.asarray([[5, 6, 7]]))
    cache = filled([3, 1, 4])

    def score(rows):
        return MODEL.target.score(MODEL.params, cache, block, rows=rows).logits

    whole = score("all")
    assert whole.dtype == jnp.float32
    one = score(jnp.asarray([1]))
    np.testing.assert_array_equal(one, whole[:, 1:2])
    assert score("none").shape == (1, 0, V)


def test_an_empty_cache_and_dead_slots_are_finite():
    cache = MODEL.target.init_cache(2, 8, jnp.float32)
    block = chain(jnp.asarray([[5, 6], [7, 8]]))
    out = MODEL.target.score(MODEL.params, cache, block)
    chex.assert_trees_all_close(out.logits[0], forward([5, 6]), atol=1e-5)
    chex.assert_trees_all_close(out.logits[1], forward([7, 8]), atol=1e-5)


def test_equal_modules_share_one_trace(naive):
    drafter = ngram(gamma=3)

    @chex.assert_max_traces(n=1)
    def step(params, state, functions):
        return jspec.decode_round(
            params,
            state,
            target=functions,
            drafter=drafter,
            rule=jspec.verify.greedy,
        )[0]

    step = jax.jit(step, static_argnames="functions")
    state = jspec.prepare(MODEL, drafter, PROMPTS, max_new_tokens=NEW).prefill()
    twin = model_of(LM(nnx.Rngs(1)))
    for params, functions in 3 * [(MODEL.params, MODEL.target)] + [
        (twin.params, twin.target)
    ]:
        state = step(jspec.Params(params), state, functions)
    assert int(jnp.min(state.round)) == 4


def test_taps_are_passed_on_or_refused_by_name():
    block = chain(jnp.asarray([[5, 6, 7]]))
    cache = filled([3, 1, 4])
    with pytest.raises(ValueError, match=r"\(0,\).*no taps"):
        MODEL.target.score(MODEL.params, cache, block, taps=(0,))
    tapped = model_of(TappedLM(nnx.Rngs(0)))
    out = tapped.target.score(tapped.params, cache, block, taps=(0,), rows="none")
    expected = MODULE.embed(block.token) + MODULE.place(jnp.asarray([[3, 4, 5]]))
    chex.assert_trees_all_close(out.features, expected)


def test_logits_of_another_vocabulary_are_refused():
    wide = model_of(MODULE, FlaxConfig(vocab_size=V + 1, max_position=LONGEST))
    with pytest.raises(ValueError, match=f"vocabulary of {V + 1}"):
        jspec.generate(wide, None, PROMPTS, max_new_tokens=2)


class Unigrams(linen.Module):
    """A Linen model that averages what it may see."""

    @linen.compact
    def __call__(self, tokens, positions, mask):
        x = linen.Embed(V, M)(tokens) + linen.Embed(LONGEST, M)(positions)
        mean = jnp.einsum("bij,bjm->bim", mask / mask.sum(-1, keepdims=True), x)
        return linen.Dense(V)(x + mean)


def test_linen_and_plain_functions():
    module, ids = Unigrams(), jnp.asarray([[1, 2, 3]])
    causal = jnp.tril(jnp.ones((1, 3, 3), bool))
    variables: Any = module.init(jax.random.key(0), ids, jnp.arange(3)[None], causal)
    functions = from_linen(module, CONFIG)
    assert functions is from_linen(Unigrams(), CONFIG)
    assert target(module.apply, CONFIG).config is CONFIG
    model = jspec.Model("linen", functions, variables, None, jnp.dtype(jnp.float32))
    plain = jspec.generate(model, None, PROMPTS, max_new_tokens=8)
    text = [p + t for p, t in zip(PROMPTS, plain.tokens, strict=True)]
    whole = jnp.tril(jnp.ones((1, 16, 16), bool))
    logits: Any = module.apply(
        variables, jnp.asarray([text[0]]), jnp.arange(16)[None], whole
    )
    assert jnp.argmax(logits, -1)[0, 7:15].tolist() == plain.tokens[0]
    out = jspec.generate(
        model, scripted.mixture(text, 3, V, seed=3), PROMPTS, max_new_tokens=8
    )
    assert out.tokens == plain.tokens
