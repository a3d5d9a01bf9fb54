"""Products in every form that a CPU has a program for; embeddings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import models, types
from jspec.models import linear
from jspec.testing import tiny

WIDE = dict(
    hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=32, query_scale=32**-0.5
)


@pytest.mark.parametrize("count", [1, 2, 5, 47, 48, 300])
def test_a_product_is_one_however_many_rows_it_has(count):
    w = jax.random.normal(jax.random.key(0), (3, 4, 16, 24))
    x = jax.random.normal(jax.random.key(1), (2, count, 24))
    bias = jax.random.normal(jax.random.key(2), w.shape[:-1])
    expected = jnp.einsum("bni,acdi->bnacd", x, w) + bias
    y = jax.jit(linear.linear)(x, w, bias)
    np.testing.assert_allclose(y, expected.reshape(2, count, -1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_few_rows_have_gradients_and_batches(dtype):
    w = jax.random.normal(jax.random.key(0), (16, 24)).astype(dtype)
    x = jax.random.normal(jax.random.key(1), (3, 5, 24))

    def loss(product, x, w):
        return jnp.sum(jnp.sin(product(x, w)))

    def plain(x, w):
        return x.astype(dtype).astype(jnp.float32) @ w.astype(jnp.float32).T

    ours, theirs = (jax.grad(loss, (1, 2))(f, x, w) for f in (linear.linear, plain))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2e-2, atol=2e-2
        )
    each = jax.vmap(linear.linear, (0, None))(x, w)
    np.testing.assert_allclose(each, linear.linear(x, w), rtol=1e-5, atol=1e-5)


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
