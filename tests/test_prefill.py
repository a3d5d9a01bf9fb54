"""Prompts scored at once leave what prompts scored in chunks leave."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.models.config import Latent
from jspec.prefill import chunk_for, fill_at_once, fill_cache, whole_for
from jspec.testing import tiny

LENGTH = jnp.array([150, 1, 73])
MODELS = {
    "plain": {},
    "windowed": {"windows": (None, 20)},
    "latent": {
        "family": "deepseek_v3",
        "kv_heads": 4,
        "head_dim": 14,
        "query_scale": 14**-0.5,
        "latent": Latent(rank=12, query_rank=20, plain_dim=8, rope_dim=6, value_dim=10),
    },
}


def tokens(width, vocab):
    return jax.random.randint(jax.random.key(0), (len(LENGTH), width), 0, vocab)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("slots", [152, 224])  # less than the block is wide, and more
def test_at_once_and_in_chunks(name, slots):
    model = tiny.model(seed=1, **MODELS[name])
    given = model.target, model.params, tokens(slots, 50), LENGTH
    options = dict(slots=slots, taps=(0, 2))
    once, parts = jax.jit(
        lambda: (
            fill_at_once(*given, width=160, **options),
            fill_cache(*given, chunk=32, **options),
        )
    )()
    assert once.cache.length.tolist() == parts.cache.length.tolist() == [149, 0, 72]
    np.testing.assert_allclose(once.features, parts.features, atol=1e-4)
    block = jspec.chain(jnp.ones((3, 2), jnp.int32))
    ours, theirs = (
        model.target.score(model.params, x.cache, block).logits for x in (once, parts)
    )
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert once.cache.slots == parts.cache.slots == slots


def test_prompts_fill_their_chunks():
    widths = [chunk_for(tokens) for tokens in (1, 33, 34, 76, 129, 130, 250, 1000)]
    assert widths == [32, 32, 64, 96, 128, 96, 128, 128]


def test_short_prompts_are_scored_at_once():
    assert [whole_for(n, 1) for n in (1, 33, 34, 1025, 1026)] == [
        32,
        32,
        64,
        1024,
        None,
    ]
    assert whole_for(250, 4) == 256
    assert whole_for(250, 5) is None
