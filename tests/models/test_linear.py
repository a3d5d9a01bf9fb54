"""Weights in blocks of rows are the same weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import models, types
from jspec.models import linear
from jspec.models.linear import Rows, wholes
from jspec.testing import tiny

WIDE = dict(
    hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=32, query_scale=32**-0.5
)


@pytest.mark.parametrize(
    ("rows", "parts", "blocks"), [(300, 2, 2), (130, 8, 2), (5, 4, 1)]
)
def test_blocks_cover_every_row_once(rows, parts, blocks):
    cuts = linear.bounds(rows, parts)
    assert len(cuts) == blocks
    assert [i for a, b in cuts for i in range(a, b)] == list(range(rows))


@pytest.mark.parametrize("count", [1, 5])
def test_product_of_blocks_is_that_of_the_whole(count):
    w = jax.random.normal(jax.random.key(0), (3, 4, 16, 24))
    flat = w.reshape(-1, 24)
    rows = Rows(w, tuple(flat[a:b] for a, b in ((0, 50), (50, 192))))
    x = jax.random.normal(jax.random.key(1), (2, count, 24))
    bias = jax.random.normal(jax.random.key(2), w.shape[:-1])
    expected = jnp.einsum("bni,acdi->bnacd", x, w) + bias
    for weight in (w, rows):
        y = linear.linear(x, weight, bias)
        np.testing.assert_allclose(
            y, expected.reshape(2, count, -1), rtol=1e-5, atol=1e-5
        )
    np.testing.assert_array_equal(rows, w)
    assert rows.shape == w.shape


def test_loaded_weights_are_cut_and_saved_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(models.load.__globals__["os"], "cpu_count", lambda: 2)
    monkeypatch.setitem(models.load.__globals__, "_AFFINITY", False)
    model = tiny.model(seed=1, **WIDE)
    loaded = models.load(models.save(model, tmp_path / "a"), dtype="float32")
    layer = loaded.params.layers[0]
    assert [len(layer.mlp.gate_up.blocks), len(layer.qkv.blocks)] == [2, 2]
    sizes = [sum(x.nbytes for x in wholes(m.params)) for m in (model, loaded)]
    assert sizes[0] == sizes[1]
    for product in (layer.mlp.gate_up, layer.qkv):
        start = product.whole.unsafe_buffer_pointer()
        assert product.blocks[0].unsafe_buffer_pointer() == start  # the same memory
        offset = product.blocks[1].unsafe_buffer_pointer() - start
        assert offset == product.blocks[0].nbytes
    block = types.chain(jnp.array([[1, 2, 3]]))
    for m in (model, loaded):
        cache = m.target.init_cache(1, 8, jnp.float32)
        logits = m.target.score(m.params, cache, block).logits
        if m is model:
            expected = logits
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
    again = models.load(models.save(loaded, tmp_path / "b"), dtype="float32")
    for a, b in zip(*map(jax.tree.leaves, (loaded.params, again.params)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("count", [5, 300])
def test_products_in_bfloat16_round_the_operands_of_large_products_alone(count):
    x = jax.random.normal(jax.random.key(0), (count, 24))
    w = jax.random.normal(jax.random.key(1), (16, 24))

    def loss(x, w):
        return jnp.sum(jnp.sin(linear.linear(x, w)))

    exact = jax.value_and_grad(loss, (0, 1))(x, w)
    with jax.default_matmul_precision("bfloat16"):
        y = linear.linear(x, w)
        rounded = jax.value_and_grad(loss, (0, 1))(x, w)
    near = [a.astype(jnp.bfloat16).astype(jnp.float32) for a in (x, w)]
    operands = near if count >= 256 else (x, w)
    np.testing.assert_allclose(y, operands[0] @ operands[1].T, rtol=1e-5, atol=1e-5)
    for a, b in zip(jax.tree.leaves(exact), jax.tree.leaves(rounded), strict=True):
        assert jnp.linalg.norm(a - b) < 2e-2 * jnp.linalg.norm(a)
        assert a.dtype == b.dtype


@pytest.mark.parametrize("count", [1, 2, 3, 40])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_products_with_narrow_weights_are_summed_in_float32(count, dtype):
    x = jax.random.normal(jax.random.key(0), (count, 200))
    w = jax.random.normal(jax.random.key(1), (2, 36, 200)).astype(dtype)
    exact = (
        np.asarray(x.astype(dtype), np.float64)
        @ np.asarray(w, np.float64).reshape(72, 200).T
    )
    y = jax.jit(linear.linear)(x, w)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-4)
    narrow = jax.jit(linear.linear)(x.astype(dtype), w)
    assert narrow.dtype == dtype
    np.testing.assert_array_equal(narrow, y.astype(dtype))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_of_an_embedding(dtype):
    table = jax.random.normal(jax.random.key(0), (30, 8)).astype(dtype)
    token = jnp.array([[3, 29], [0, 3]])
    rows = jax.jit(linear.looked_up, static_argnums=2)(table, token, jnp.float32)
    np.testing.assert_array_equal(rows, np.asarray(table, np.float32)[token])


def test_looking_up_makes_no_wide_copy_of_the_table():
    table = jnp.ones((300, 64), jnp.bfloat16)
    look = jax.jit(linear.looked_up, static_argnums=2)
    for count in (1, 3):
        token = jnp.ones(count, int)
        text = look.lower(table, token, jnp.float32).compile().as_text()
        assert "f32[300,64]" not in text


def test_the_stream_of_a_narrow_model_is_wide_on_a_cpu(tmp_path):
    """Norms stay float32, and so does what is added up from layer to layer."""
    folder = models.save(tiny.model(seed=1, **WIDE), tmp_path)
    wide, narrow = (models.load(folder, dtype=d) for d in ("float32", "bfloat16"))
    assert narrow.params.layers[0].mlp.gate_up.dtype == jnp.bfloat16
    block, found = types.chain(jnp.array([[1, 2, 3]])), []
    for m in (wide, narrow):
        cache = m.target.init_cache(1, 8, m.dtype)
        found.append(m.target.score(m.params, cache, block, taps=(1, -1)))
        assert found[-1].features.dtype == jnp.float32
        assert found[-1].kv.k[0].dtype == m.dtype
        assert m.cache_dtype == jnp.float32
    size = float(jnp.std(found[0].logits))
    np.testing.assert_allclose(found[1].logits, found[0].logits, atol=0.1 * size)
