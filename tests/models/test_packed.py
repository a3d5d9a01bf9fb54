"""Packed rows give what every node gives by itself."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import scoring, types
from jspec.models.config import Latent
from jspec.testing import tiny

BATCH, NODES, SLOTS = 3, 5, 24
# 0 -> 1 -> 2, 1 -> 3, 0 -> 4
PARENT = jnp.broadcast_to(jnp.asarray([-1, 0, 1, 1, 0]), (BATCH, NODES))
LIVE = jnp.asarray([[1, 1, 0, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]], bool)
MODELS = {
    "transformer": tiny.model(windows=(4, None), qk_norm=True),
    "deepseek": tiny.model(
        family="deepseek_v3",
        kv_heads=4,
        head_dim=14,
        query_scale=14**-0.5,
        latent=Latent(rank=12, query_rank=20, plain_dim=8, rope_dim=6, value_dim=10),
    ),
}


def block(live, seed=0):
    token = np.random.default_rng(seed).integers(0, 61, (BATCH, NODES))
    return types.Block(jnp.asarray(token), PARENT, live, live)


@functools.cache
def scored(name):
    """A cache of different lengths, and the scores of all nodes."""
    model = MODELS[name]
    cache = model.target.init_cache(BATCH, SLOTS, jnp.float32)
    chain = types.chain(jnp.arange(BATCH * 8).reshape(BATCH, 8))
    kv = model.target.score(model.params, cache, chain).kv
    path = jnp.broadcast_to(jnp.arange(8), (BATCH, 8))
    cache = cache.append(kv, path, jnp.asarray([7, 3, 5]))
    whole = block(jnp.ones_like(LIVE))
    return cache, model.target.score(model.params, cache, whole, taps=(0, 1, -1))


def check(out, want, live):
    """The same logits, features, keys and values at live nodes."""
    for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape and bool(jnp.all(jnp.isfinite(a)))
        np.testing.assert_allclose(a[live], b[live], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("count", [4, 7, BATCH * NODES])
def test_live_nodes_are_scored_as_without_packing(name, count):
    cache, want = scored(name)
    score = MODELS[name].target.score
    out = score(MODELS[name].params, cache, block(LIVE), taps=(0, 1, -1), packed=count)
    check(out, want, np.asarray(LIVE))


@pytest.mark.parametrize("rows", ["none", "picked"])
def test_rows_are_picked_from_packed_blocks(rows):
    cache, want = scored("transformer")
    pick = jnp.asarray([3, 0, 0]) if rows == "picked" else rows
    model = MODELS["transformer"]
    out = model.target.score(model.params, cache, block(LIVE), rows=pick, packed=4)
    if rows == "none":
        assert out.logits.shape == (BATCH, 0, 61)
    else:
        for b, node in ((0, 3), (1, 0)):
            np.testing.assert_allclose(
                out.logits[b, 0], want.logits[b, node], rtol=1e-5, atol=2e-5
            )


@pytest.mark.parametrize(
    ("lengths", "count"),
    [((1, 1, 0), 2), ((3, 1, 0), 5), ((2, 2, 2), 6), ((5, 1, 1), 15)],
    ids=str,
)
def test_the_fewest_rows_that_hold_the_live_nodes_are_scored(lengths, count):
    """Chains of these lengths; there are programs for 2, 5, 6 (two a chain) and 15 rows."""
    model, (cache, _) = MODELS["transformer"], scored("transformer")
    live = jnp.arange(NODES) < jnp.asarray(lengths)[:, None]
    seen = []

    def score(params, cache, block, *, taps=(), packed=None):
        jax.debug.callback(seen.append, block.token.size if packed is None else packed)
        return model.target.score(params, cache, block, taps=taps, packed=packed)

    target = model.target._replace(score=score)
    shape = types.DraftShape(NODES, NODES - 1, widths=(2,), packs=(2 / 3, 1.5))
    given = dataclasses.replace(block(live), parent=types.chain(PARENT).parent)
    out, first = jax.jit(scoring.score_live, static_argnums=(0, 4, 5))(
        target, model.params, cache, given, shape, lambda logits: logits[:, 0]
    )
    jax.block_until_ready(out)
    jax.effects_barrier()
    assert seen == [count]
    want = model.target.score(model.params, cache, given)
    np.testing.assert_array_equal(first, out.logits[:, 0])
    np.testing.assert_allclose(
        out.logits[np.asarray(live)],
        want.logits[np.asarray(live)],
        rtol=1e-5,
        atol=2e-5,
    )
