"""Latent attention against itself: the cache's contract, and decoding end to end."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jspec
from jspec import drafters, types
from jspec.models import architecture, deepseek, transformer
from jspec.models.config import Experts, Latent
from jspec.testing import tiny

T, SLOTS, V = 24, 40, 61
TIGHT = 2e-5
# These programs run once: compiling them is what takes the time.
QUICK = {"xla_backend_optimization_level": 0}
SETTINGS = dict(
    family="deepseek_v3",
    layers=3,
    kv_heads=4,
    head_dim=14,
    query_scale=14**-0.5,
    latent=Latent(rank=12, query_rank=20, plain_dim=8, rope_dim=6, value_dim=10),
    experts=Experts(
        count=8,
        per_token=2,
        intermediate=24,
        score="sigmoid",
        scale=2.5,
        groups=4,
        groups_kept=2,
        corrected=True,
        shared=1,
        dense_layers=(0,),
    ),
)
CONFIG = tiny.config(**SETTINGS)
TARGET = deepseek.target(CONFIG)
PARAMS = deepseek.init(CONFIG, jax.random.key(1), scale=0.3)


def tokens(batch=1, count=T, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, V, (batch, count)))


@functools.cache
def scorer(taps=(), rows="all"):
    def run(params, cache, block):
        return TARGET.score(params, cache, block, taps=taps, rows=rows)

    return jax.jit(run, compiler_options=QUICK)


def keep(cache, kv, count):
    """The first nodes of a chain block, appended."""
    path = jnp.broadcast_to(jnp.arange(kv[0].shape[1]), kv[0].shape[:2])
    return cache.append(
        kv, path, jnp.broadcast_to(jnp.asarray(count), (path.shape[0],))
    )


def prefill(ids, dtype=jnp.float32):
    """Scores and the cache after ``ids``; padded to T tokens, so one program serves."""
    batch, count = ids.shape
    padded = jnp.pad(ids, ((0, 0), (0, T - count)))
    out = scorer()(PARAMS, TARGET.init_cache(batch, SLOTS, dtype), types.chain(padded))
    return out, keep(TARGET.init_cache(batch, SLOTS, dtype), out.kv, count)


def test_a_token_is_cached_as_one_latent():
    _, cache = prefill(tokens(batch=2))
    assert [c.shape for c in cache.latent] == [(2, 1, SLOTS, 12 + 6)] * 3
    assert cache.slots == SLOTS
    assert cache.crop(T).slots == T
    np.testing.assert_array_equal(cache.length, [T, T])
    assert len(jax.tree.leaves(cache)) == 3 + 1


def test_chain_equals_one_by_one_and_chunks():
    ids = tokens()
    whole, _ = prefill(ids)
    for size in (1, 4):
        cache, rows = TARGET.init_cache(1, SLOTS), []
        for at in range(0, 20, size):
            out = scorer()(PARAMS, cache, types.chain(ids[:, at : at + size]))
            cache = keep(cache, out.kv, size)
            rows.append(out.logits[0])
        np.testing.assert_allclose(
            np.concatenate(rows), whole.logits[0, :20], atol=TIGHT
        )
        assert int(cache.length[0]) == 20


# A tree: 0 -> 1 -> 2 -> 3, 1 -> 4 -> 5, 0 -> 6.
PARENT = (-1, 0, 1, 2, 1, 4, 0)
PATHS = ((0, 1, 2, 3), (0, 1, 4, 5), (0, 6))


def tree_block(ids, dead=()):
    count = len(PARENT)
    live = np.ones((1, count), bool)
    live[0, list(dead)] = False
    return types.Block(
        token=ids[:, :count].astype(jnp.int32),
        parent=jnp.asarray([PARENT]),
        live=jnp.asarray(live),
        vote=jnp.asarray(live),
    )


@pytest.mark.parametrize("before", [3, 16])
def test_tree_rows_equal_the_chains_of_their_paths(before):
    _, cache = prefill(tokens(count=before))
    ids = tokens(seed=1)
    score = scorer((0, 1, 2, 3, -1))
    tree = score(PARAMS, cache, tree_block(ids))
    for path in PATHS:
        nodes = np.array(path)
        padded = np.pad(nodes, (0, len(PARENT) - len(nodes)))
        chain = score(PARAMS, cache, types.chain(ids[:, padded]))
        pairs = [(tree.logits, chain.logits), (tree.features, chain.features)]
        pairs += zip(tree.kv, chain.kv, strict=True)
        for a, b in pairs:
            np.testing.assert_allclose(a[0, nodes], b[0, : len(nodes)], atol=TIGHT)


def test_only_the_accepted_path_is_stored():
    """A tree's path equals its chain; every other slot keeps what it held."""
    _, cache = prefill(tokens(count=10))
    ids, nodes = tokens(seed=1), jnp.array([0, 1, 4, 5])
    before = [np.asarray(c) for c in cache.latent]
    tree = scorer()(PARAMS, cache, tree_block(ids))
    for c, old in zip(cache.latent, before, strict=True):
        np.testing.assert_array_equal(c, old)
    path = jnp.concatenate([nodes, -jnp.ones(2, jnp.int32)])[None]
    after_tree = cache.append(tree.kv, path, jnp.array([4]))
    chain = scorer()(PARAMS, cache, types.chain(ids[:, nodes]))
    after_chain = keep(cache, chain.kv, 4)
    assert int(after_tree.length[0]) == int(after_chain.length[0]) == 14
    for a, b, old in zip(after_tree.latent, after_chain.latent, before, strict=True):
        np.testing.assert_allclose(a[:, :, :14], b[:, :, :14], atol=TIGHT)
        np.testing.assert_array_equal(a[:, :, :10], old[:, :, :10])
    step = types.chain(tokens(count=1, seed=2))
    a = scorer()(PARAMS, after_tree, step).logits
    b = scorer()(PARAMS, after_chain, step).logits
    np.testing.assert_allclose(a, b, atol=TIGHT)


def test_rewinding_forgets():
    ids = tokens(count=14)
    _, long = prefill(ids)
    _, short = prefill(ids[:, :6])
    block = types.chain(tokens(count=4, seed=1))
    a = scorer()(PARAMS, long.rewind(jnp.array([6])), block).logits
    b = scorer()(PARAMS, short, block).logits
    np.testing.assert_allclose(a, b, atol=TIGHT)
    assert np.abs(scorer()(PARAMS, long, block).logits - b).max() > 1e-2


def test_ragged_batch_equals_its_singles():
    ids, lengths = tokens(batch=3, count=14), [4, 14, 9]
    out, _ = prefill(ids)
    cache = keep(TARGET.init_cache(3, SLOTS), out.kv, jnp.array(lengths))
    block = types.chain(tokens(batch=3, count=4, seed=1))
    batch = scorer()(PARAMS, cache, block)
    for i, length in enumerate(lengths):
        _, one = prefill(ids[i : i + 1, :length])
        single = scorer()(PARAMS, one, types.chain(block.token[i : i + 1]))
        np.testing.assert_allclose(batch.logits[i], single.logits[0], atol=TIGHT)


def test_what_dead_slots_and_dead_nodes_hold_changes_nothing():
    _, cache = prefill(tokens(count=10))
    ids = tokens(seed=1)
    other = ids.at[:, jnp.array([3, 5])].add(1) % V
    live = np.array([0, 1, 2, 4, 6])
    rows = []
    for fill, text in ((0.0, ids), (1e4, other)):
        junk = tuple(c.at[:, :, 10:].set(fill) for c in cache.latent)
        held = dataclasses.replace(cache, latent=junk)
        out = scorer()(PARAMS, held, tree_block(text, dead=(3, 5)))
        rows.append(out.logits[:, live])
    np.testing.assert_allclose(*rows, atol=TIGHT)


def test_taps_are_the_residual_stream():
    ids = types.chain(tokens())
    out = scorer((0, 1, 3, -1))(PARAMS, TARGET.init_cache(1, SLOTS), ids)
    x0, x1, x3, last = np.split(np.asarray(out.features[0]), 4, -1)
    np.testing.assert_array_equal(x0, PARAMS.embed[ids.token[0]])
    one = deepseek.target(CONFIG.first(1))
    first = dataclasses.replace(PARAMS, layers=PARAMS.layers[:1])
    shallow = one.score(first, one.init_cache(1, SLOTS), ids, taps=(1,))
    np.testing.assert_allclose(shallow.features[0], x1, atol=TIGHT)
    norm = x3 / np.sqrt((x3**2).mean(-1, keepdims=True) + CONFIG.norm_eps)
    np.testing.assert_allclose(last, norm * PARAMS.final_norm, atol=TIGHT)
    np.testing.assert_allclose(out.logits[0], last @ PARAMS.head.T, atol=1e-4)
    plain = scorer()(PARAMS, TARGET.init_cache(1, SLOTS), ids)
    assert plain.features is None


def test_rows_picks_logits():
    block, cache = types.chain(tokens(batch=2, count=6)), TARGET.init_cache(2, SLOTS)
    every, none = scorer()(PARAMS, cache, block), scorer(rows="none")
    none = none(PARAMS, cache, block)

    def pick(params, cache, block, rows):
        return TARGET.score(params, cache, block, rows=rows)

    some = jax.jit(pick, compiler_options=QUICK)(
        PARAMS, cache, block, jnp.array([4, 1])
    )
    assert none.logits.shape == (2, 0, V)
    expected = np.stack([every.logits[0, 4], every.logits[1, 1]])
    np.testing.assert_allclose(some.logits[:, 0], expected, atol=TIGHT)
    np.testing.assert_allclose(none.kv[2], every.kv[2], atol=TIGHT)


def test_bfloat16_cache_rounds_latents_only():
    _, fine = prefill(tokens())
    _, coarse = prefill(tokens(), jnp.bfloat16)
    assert {c.dtype for c in coarse.latent} == {jnp.dtype(jnp.bfloat16)}
    block = types.chain(tokens(count=4, seed=1))
    a, b = (scorer()(PARAMS, c, block).logits for c in (fine, coarse))
    assert a.dtype == b.dtype == jnp.float32
    # One expert chosen differently is a jump, so most rows are compared, not the worst.
    error = np.abs(a - b).max(-1) / np.abs(a).max()
    assert 0 < np.median(error) < 0.03


def test_gradients_are_finite():
    ids = types.chain(tokens(count=6))

    def loss(params):
        out = TARGET.score(params, TARGET.init_cache(1, SLOTS), ids)
        return -jax.nn.log_softmax(out.logits)[0, :, 3].mean()

    gradient = jax.jit(jax.grad(loss), compiler_options=QUICK)(PARAMS)
    sizes = [float(jnp.abs(g).max()) for g in jax.tree.leaves(gradient)]
    assert np.isfinite(sizes).all()
    # The correction steers the choice alone, which has no gradient.
    corrections = sum(layer.mlp.correction is not None for layer in PARAMS.layers[1:])
    assert sum(s == 0 for s in sizes) == corrections


def test_the_config_chooses_the_forward():
    assert architecture.target(CONFIG) is TARGET
    dense = tiny.config()
    assert architecture.target(dense) is transformer.target(dense)
    with pytest.raises(ValueError, match="llama config has no latent attention"):
        deepseek.target(dense).init_cache(1, 8)


# End to end.

PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [5], [7, 8, 9, 7, 8]]
NEW = 24


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A tiny DeepSeek-V3 saved by transformers."""
    folder = tmp_path_factory.mktemp("deepseek")
    return jspec.load(oracle.save(oracle.build("deepseek_v3"), folder))


@pytest.fixture(scope="module")
def plain(loaded):
    return jspec.generate(loaded, None, PROMPTS, max_new_tokens=NEW, eos_ids=())


DRAFTERS = {
    "ngram": lambda model: jspec.Draft(drafters.ngram(gamma=4, longest=3, shortest=1)),
    "first-layers": lambda model: jspec.load_drafter(
        drafters.first_layers(model, 2), model, gamma=2
    ),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_output_is_plain_greedy(name, loaded, plain):
    draft = DRAFTERS[name](loaded)
    out = jspec.generate(loaded, draft, PROMPTS, max_new_tokens=NEW, eos_ids=())
    assert out.tokens == plain.tokens
    assert out.stats.tau > 1


def test_plain_greedy_is_transformers(loaded, plain):
    hf = oracle.build("deepseek_v3")
    for prompt, new in zip(PROMPTS, plain.tokens, strict=True):
        text = np.array([prompt + new])
        best = oracle.hf_logits(hf, text).argmax(-1)
        assert best[len(prompt) - 1 : -1].tolist() == new


def test_greedy_output_of_qwen3_moe_is_plain_greedy(tmp_path):
    model = jspec.load(oracle.save(oracle.build("qwen3_moe"), tmp_path))
    options = dict(max_new_tokens=NEW, eos_ids=())
    out = jspec.generate(model, DRAFTERS["ngram"](model), PROMPTS[:1], **options)
    assert out.tokens == jspec.generate(model, None, PROMPTS[:1], **options).tokens
    assert out.stats.tau > 1


def test_tiny_random_model_is_saved_and_loaded(tmp_path):
    model = tiny.model(**SETTINGS)
    again = jspec.load(jspec.save(model, tmp_path))
    assert again.config == model.config
    for a, b in zip(
        jax.tree.leaves(again.params), jax.tree.leaves(model.params), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_weights_of_another_kind_are_not_saved(tmp_path):
    model, other = tiny.model(**SETTINGS), tiny.model(layers=3)
    mixed = model.params.replace(layers=other.params.layers)
    with pytest.raises(ValueError, match=r"layers\.0\.\w+ have shape None"):
        jspec.save((model.config, mixed), tmp_path / "out")
