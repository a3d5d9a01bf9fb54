"""Block-diffusion drafters against recordings of the code they come from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity import CLOSE, DATA, ids, recorded

import jspec
from jspec import cache as kv_cache
from jspec.drafters import dflash
from jspec.drafters.block_reach import decoding
from jspec.drafters.diffusion import body
from jspec.drafters.published_dflash import load_dflash

ZLAB = ("dflash_v1", "dflash_v1_swa", "dflash_v2")


@pytest.fixture(scope="module")
def target():
    return jspec.load(DATA / "dflash_target", dtype="float32")


@pytest.mark.parametrize("name", ZLAB)
def test_forward(name, target):
    head, io = load_dflash(DATA / name, target), recorded(name)
    design, params, config = head.design, head.weights, head.design.config
    features, x = jnp.asarray(io["in.ctx"]), jnp.asarray(io["in.noise"])
    length, rows = features.shape[1], x.shape[1]
    cache = kv_cache.init(
        config.layers, 1, config.kv_heads, config.head_dim, 32, jnp.float32
    )
    with jax.default_matmul_precision("highest"):
        cache = dflash.inject(
            design,
            params,
            cache,
            features,
            jnp.arange(length)[None],
            jnp.array([length]),
        )
        position = length + jnp.arange(rows)[None]
        out = body(design, params, x, position, decoding(design, cache, rows))
    np.testing.assert_allclose(out, io["out.hidden"], **CLOSE)


@pytest.mark.parametrize("name", ZLAB)
def test_greedy_loop(name, target):
    """The same text, and the same number of tokens kept in every round.

    Their first token is prefill's; ours is emitted by the first round as any other, so
    the prompt here ends in it.
    """
    io = recorded(name)
    text, count = io["out.gen.T0.0"][0].tolist(), io["in.prompt"].shape[1]
    kept = io["out.acc.T0.0"].tolist()
    draft = jspec.load_drafter(DATA / name, target)
    prompt, new = text[: count + 1], len(text) - count - 1
    out = jspec.generate(target, draft, [prompt], max_new_tokens=new, eos_ids=())
    assert out.tokens[0] == text[count + 1 :]
    request = jspec.prepare(target, draft, [prompt], max_new_tokens=new, eos_ids=())
    state = request.run(request.prefill(), jnp.int32(100))
    rounds = int(state.round[0])
    assert state.emitted[0, :rounds].tolist() == kept
    plain = jspec.generate(target, None, [prompt], max_new_tokens=new, eos_ids=())
    assert plain.tokens == out.tokens
    assert ids(io["out.baseline"])[0].tolist() == text
