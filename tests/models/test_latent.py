"""Attention over latents is block attention whose keys are its values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import tree
from jspec.models.latent import latent_attention
from jspec.pallas import block_attention

PARENT = jnp.array([[-1, 0, 1, 2, 1, 4], [-1, 0, 0, 1, 1, 2], [-1, 0, 1, 2, 3, 4]])
LENGTH = jnp.array([0, 7, 20])
SLOTS, HEADS, R = 20, 4, 18


def inputs(dtype=jnp.float32):
    ks = jax.random.split(jax.random.key(0), 3)
    batch, nodes = PARENT.shape
    q = jax.random.normal(ks[0], (batch, nodes, HEADS, R))
    stored = jax.random.normal(ks[1], (batch, 1, SLOTS, R))
    own = jax.random.normal(ks[2], (batch, nodes, 1, R))
    return [x.astype(dtype) for x in (q, stored, own)]


def expected(q, stored, own):
    keys = stored.swapaxes(2, 3)
    mask = tree.ancestors(PARENT)
    return block_attention(q, keys, stored, LENGTH, own, own, mask, scale=0.3)


@pytest.mark.parametrize("dtype, atol", [(jnp.float32, 1e-6), (jnp.bfloat16, 0.02)])
def test_equals_block_attention(dtype, atol):
    q, stored, own = inputs(dtype)
    mask = tree.ancestors(PARENT)
    got = latent_attention(q, stored, LENGTH, own, mask, scale=0.3)
    assert got.dtype == jnp.float32
    wide = [x.astype(jnp.float32) for x in (q, stored, own)]
    np.testing.assert_allclose(got, expected(*wide), atol=atol)


def test_dead_slots_do_not_matter():
    q, stored, own = inputs()
    mask = tree.ancestors(PARENT)
    dead = jnp.arange(SLOTS) >= LENGTH[:, None]
    junk = jnp.where(dead[:, None, :, None], 1e4, stored)
    a = latent_attention(q, stored, LENGTH, own, mask, scale=0.3)
    b = latent_attention(q, junk, LENGTH, own, mask, scale=0.3)
    np.testing.assert_array_equal(a, b)
