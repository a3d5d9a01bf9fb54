"""The transformer against itself: every way to score the same tokens agrees."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import types
from jspec.models import transformer
from jspec.models.config import Rope
from jspec.testing import tiny

T, SLOTS, V = 24, 40, 61
TIGHT = 2e-5
# These programs run once: compiling them is what takes the time.
QUICK = {"xla_backend_optimization_level": 0}

PLAIN = tiny.config()
GEMMA = dataclasses.replace(
    PLAIN,
    family="gemma3_text",
    zero_centred=True,
    activation="gelu_pytorch_tanh",
    tie_embeddings=True,
    qk_norm=True,
    sandwich_norm=True,
    embed_scale=32**0.5,
    windows=(6, None),
    ropes=(Rope(), Rope(theta=1e6, kind="linear", factor=8.0)),
    attn_softcap=3.0,
    final_softcap=4.0,
)
CONFIGS = {"plain": PLAIN, "gemma": GEMMA}


@functools.cache
def weights(config):
    return transformer.init(config, jax.random.key(1), scale=0.3)


def tokens(batch=1, count=T, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, V, (batch, count)))


@functools.cache
def scorer(config, taps=()):
    target = transformer.target(config)

    def run(params, cache, block):
        return target.score(params, cache, block, taps=taps)

    return jax.jit(run, compiler_options=QUICK)


def empty(config, batch=1, dtype=jnp.float32):
    return transformer.target(config).init_cache(batch, SLOTS, dtype)


def keep(cache, kv, count):
    """The first nodes of a chain block, appended."""
    path = jnp.broadcast_to(jnp.arange(kv.k[0].shape[1]), kv.k[0].shape[:2])
    return cache.append(
        kv, path, jnp.broadcast_to(jnp.asarray(count), (path.shape[0],))
    )


def prefill(config, ids, dtype=jnp.float32):
    """Scores and the cache after ``ids``; padded to T tokens, so one program serves."""
    batch, count = ids.shape
    padded = jnp.pad(ids, ((0, 0), (0, T - count)))
    cache = empty(config, batch, dtype)
    out = scorer(config)(weights(config), cache, types.chain(padded))
    return out, keep(cache, out.kv, count)


@pytest.mark.parametrize("name", CONFIGS)
def test_chain_equals_one_by_one_and_chunks(name):
    config, ids = CONFIGS[name], tokens()
    whole, _ = prefill(config, ids)
    for size in (1, 4):
        cache, rows = empty(config), []
        for at in range(0, 20, size):
            block = types.chain(ids[:, at : at + size])
            out = scorer(config)(weights(config), cache, block)
            cache = keep(cache, out.kv, size)
            rows.append(out.logits[0])
        got = np.concatenate(rows)
        np.testing.assert_allclose(got, whole.logits[0, :20], atol=TIGHT)
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


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("before", [3, 16])
def test_tree_rows_equal_the_chains_of_their_paths(name, before):
    config = CONFIGS[name]
    _, cache = prefill(config, tokens(count=before))
    ids = tokens(seed=1)
    score = scorer(config, (0, 1, 2, -1))
    tree = score(weights(config), cache, tree_block(ids))
    for path in PATHS:
        nodes = np.array(path)
        padded = np.pad(nodes, (0, len(PARENT) - len(nodes)))
        chain = score(weights(config), cache, types.chain(ids[:, padded]))
        pairs = [(tree.logits, chain.logits), (tree.features, chain.features)]
        pairs += zip(tree.kv.k + tree.kv.v, chain.kv.k + chain.kv.v, strict=True)
        for a, b in pairs:
            np.testing.assert_allclose(a[0, nodes], b[0, : len(nodes)], atol=TIGHT)


@pytest.mark.parametrize("name", CONFIGS)
def test_an_accepted_path_continues_like_its_chain(name):
    config = CONFIGS[name]
    _, cache = prefill(config, tokens(count=10))
    ids, nodes = tokens(seed=1), jnp.array([0, 1, 4, 5])
    score, params = scorer(config), weights(config)
    tree = score(params, cache, tree_block(ids))
    path = jnp.concatenate([nodes, -jnp.ones(2, jnp.int32)])[None]
    after_tree = cache.append(tree.kv, path, jnp.array([4]))
    chain = score(params, cache, types.chain(ids[:, nodes]))
    after_chain = keep(cache, chain.kv, 4)
    step = types.chain(tokens(count=1, seed=2))
    a = score(params, after_tree, step).logits
    b = score(params, after_chain, step).logits
    np.testing.assert_allclose(a, b, atol=TIGHT)


@pytest.mark.parametrize("name", CONFIGS)
def test_ragged_batch_equals_its_singles(name):
    config, params = CONFIGS[name], weights(CONFIGS[name])
    ids, lengths = tokens(batch=3, count=14), [4, 14, 9]
    out, _ = prefill(config, ids)
    cache = keep(empty(config, 3), out.kv, jnp.array(lengths))
    block = types.chain(tokens(batch=3, count=4, seed=1))
    batch = scorer(config)(params, cache, block)
    for i, length in enumerate(lengths):
        _, one = prefill(config, ids[i : i + 1, :length])
        single = scorer(config)(params, one, types.chain(block.token[i : i + 1]))
        np.testing.assert_allclose(batch.logits[i], single.logits[0], atol=TIGHT)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_dead_cache_slots_hold_changes_nothing(name):
    config = CONFIGS[name]
    _, cache = prefill(config, tokens(count=10))
    junk = [
        dataclasses.replace(
            cache,
            k=tuple(k.at[..., 10:].set(fill) for k in cache.k),
            v=tuple(v.at[..., 10:, :].set(fill) for v in cache.v),
        )
        for fill in (0.0, 1e4)
    ]
    block = types.chain(tokens(count=4, seed=1))
    a, b = (scorer(config)(weights(config), c, block).logits for c in junk)
    np.testing.assert_array_equal(a, b)


def test_what_dead_nodes_hold_changes_nothing():
    _, cache = prefill(PLAIN, tokens(count=10))
    ids = tokens(seed=1)
    other = ids.at[:, jnp.array([3, 5])].add(1) % V
    run = scorer(PLAIN)
    a = run(weights(PLAIN), cache, tree_block(ids, dead=(3, 5))).logits
    b = run(weights(PLAIN), cache, tree_block(other, dead=(3, 5))).logits
    live = np.array([0, 1, 2, 4, 6])
    np.testing.assert_array_equal(a[:, live], b[:, live])


def test_window_hides_exactly_the_tokens_before_it():
    """One layer with window 6: row i sees tokens i-5 .. i."""
    config = dataclasses.replace(PLAIN, layers=1, windows=(6,), ropes=(Rope(),))
    ids = tokens()
    base = prefill(config, ids)[0].logits[0]
    for at in (0, 7):
        other = ids.at[0, at].add(1) % V
        new = prefill(config, other)[0].logits[0]
        changed = np.abs(new - base).max(-1) > 1e-6
        assert list(np.flatnonzero(changed)) == list(range(at, min(at + 6, T)))
        # And the same across the border between cache and block.
        _, cache = prefill(config, other[:, :10])
        rest = scorer(config)(weights(config), cache, types.chain(other[:, 10:14]))
        np.testing.assert_allclose(rest.logits[0], new[10:14], atol=TIGHT)


def test_softcaps_are_c_tanh_of_x_over_c():
    capped = dataclasses.replace(PLAIN, final_softcap=2.0)
    params = weights(PLAIN)
    a = prefill(PLAIN, tokens())[0].logits
    block, cache = types.chain(tokens()), empty(capped)
    b = scorer(capped)(params, cache, block).logits
    np.testing.assert_allclose(b, 2.0 * np.tanh(a / 2.0), atol=1e-6)
    # A cap far above the scores is no cap; a tiny one flattens attention.
    far = dataclasses.replace(PLAIN, attn_softcap=1e4)
    near = dataclasses.replace(PLAIN, attn_softcap=1e-6)
    np.testing.assert_allclose(scorer(far)(params, cache, block).logits, a, atol=1e-4)
    flat = scorer(near)(params, cache, block).logits
    zero = dataclasses.replace(PLAIN, query_scale=0.0)
    np.testing.assert_allclose(
        flat, scorer(zero)(params, cache, block).logits, atol=1e-4
    )
    assert np.abs(flat - a).max() > 1e-2


def test_taps_are_the_residual_stream():
    config, ids, params = PLAIN, tokens(), weights(PLAIN)
    run = scorer(config, (0, 1, 2, -1))
    out = run(params, empty(config), types.chain(ids))
    x0, x1, x2, last = np.split(np.asarray(out.features[0]), 4, -1)
    np.testing.assert_array_equal(x0, params.embed[ids[0]])
    one = dataclasses.replace(config, layers=1, windows=(None,), ropes=(Rope(),))
    first = dataclasses.replace(params, layers=params.layers[:1])
    shallow = scorer(one, (1,))(
        first, transformer.target(one).init_cache(1, SLOTS), types.chain(ids)
    )
    np.testing.assert_allclose(shallow.features[0], x1, atol=TIGHT)
    norm = x2 / np.sqrt((x2**2).mean(-1, keepdims=True) + config.norm_eps)
    np.testing.assert_allclose(last, norm * params.final_norm, atol=TIGHT)
    np.testing.assert_allclose(out.logits[0], last @ params.head.T, atol=1e-4)
    assert scorer(config)(params, empty(config), types.chain(ids)).features is None


def test_rows_picks_logits():
    target, params = transformer.target(PLAIN), weights(PLAIN)
    block, cache = types.chain(tokens(batch=2, count=6)), empty(PLAIN, 2)
    every = target.score(params, cache, block)
    none = target.score(params, cache, block, rows="none")
    some = target.score(params, cache, block, rows=jnp.array([4, 1]))
    assert none.logits.shape == (2, 0, V)
    assert some.logits.shape == (2, 1, V)
    expected = np.stack([every.logits[0, 4], every.logits[1, 1]])
    np.testing.assert_allclose(some.logits[:, 0], expected, atol=TIGHT)
    np.testing.assert_allclose(none.kv.k[1], every.kv.k[1], atol=TIGHT)


@pytest.mark.parametrize("name", CONFIGS)
def test_bfloat16_weights_and_cache(name):
    """Logits stay float32, the cache its dtype, and the error is bfloat16's."""
    config, ids = CONFIGS[name], tokens()
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights(config))
    rounded = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    exact = scorer(config)(rounded, empty(config), types.chain(ids)).logits
    for cache_dtype in (jnp.bfloat16, jnp.float32):
        cache = empty(config, 1, cache_dtype)
        out = scorer(config)(params, cache, types.chain(ids))
        assert out.logits.dtype == jnp.float32
        after = keep(cache, out.kv, T)
        assert after.k[0].dtype == after.v[1].dtype == cache_dtype
        error = np.abs(out.logits - exact).max() / np.abs(exact).max()
        assert error < 0.06
    # A float32 model with a bfloat16 cache: only keys and values are rounded.
    block = types.chain(tokens(count=4, seed=1))
    _, fine = prefill(config, ids)
    _, coarse = prefill(config, ids, jnp.bfloat16)
    a, b = (scorer(config)(weights(config), c, block).logits for c in (fine, coarse))
    assert 0 < np.abs(a - b).max() / np.abs(a).max() < 0.03


def test_padded_vocabulary_never_wins():
    config = dataclasses.replace(PLAIN, vocab_size=V - 5)
    out = scorer(config)(weights(PLAIN), empty(config), types.chain(tokens() % (V - 5)))
    assert out.logits.shape[-1] == V
    assert np.isneginf(out.logits[..., -5:]).all()
    assert np.isfinite(out.logits[..., :-5]).all()


def test_biases_enter_where_they_should():
    """Zero weights leave only biases: each one must reach the output."""
    config = dataclasses.replace(PLAIN, qkv_bias=True, out_bias=True, mlp_bias=True)
    params = weights(config)
    ids = types.chain(tokens(count=4))
    base = scorer(config)(params, empty(config), ids).logits
    layer = params.layers[0]
    in_mlp = ("gate_up_bias", "down_bias")
    for field in ("qkv_bias", "out_bias", *in_mlp):
        part = layer.mlp if field in in_mlp else layer
        part = part.replace(**{field: getattr(part, field) + 0.1})
        changed = layer.replace(mlp=part) if field in in_mlp else part
        other = params.replace(layers=(changed, *params.layers[1:]))
        new = scorer(config)(other, empty(config), ids).logits
        assert np.abs(new - base).max() > 1e-3, field


def test_gradients_are_finite_with_masked_rows():
    config, ids = GEMMA, tokens(count=6)
    target = transformer.target(config)

    def loss(params):
        out = target.score(params, empty(config), types.chain(ids))
        return -jax.nn.log_softmax(out.logits)[0, :, 3].mean()

    gradient = jax.jit(jax.grad(loss), compiler_options=QUICK)(weights(config))
    for g in jax.tree.leaves(gradient):
        assert np.isfinite(g).all()


def test_config_refuses_what_cannot_be():
    with pytest.raises(ValueError, match="cannot share"):
        dataclasses.replace(PLAIN, kv_heads=3)
    with pytest.raises(ValueError, match="windows has 1 entries for 2 layers"):
        dataclasses.replace(PLAIN, windows=(None,))


def test_equal_configs_share_their_target():
    assert transformer.target(PLAIN) is transformer.target(dataclasses.replace(PLAIN))
