"""Blockwise heads in a folder: there and back, and what is refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.drafters.heads import init_blockwise
from jspec.drafters.stored_blockwise import read_blockwise, save_blockwise
from jspec.testing import tiny

MODEL = tiny.model(seed=3)
IDS = jnp.arange(0, 61, 2)


def weights(ids=None):
    vocab = MODEL.params.head if ids is None else MODEL.params.head[ids]
    made = init_blockwise(jax.random.key(1), vocab, 3, wide=5)
    down = jax.random.normal(jax.random.key(2), made.down.shape)
    return made.replace(down=down, to_target=ids)


@pytest.mark.parametrize("ids", [None, IDS])
def test_heads_come_back_and_draft(ids, tmp_path):
    save_blockwise(weights(ids), tmp_path, 61, jnp.float32)
    found = read_blockwise(tmp_path, MODEL)
    for a, b in zip(*map(jax.tree.leaves, (found, weights(ids))), strict=True):
        np.testing.assert_array_equal(a, b)
    text = [[5, 9, 2, 7]]
    plain = jspec.generate(MODEL, None, text, max_new_tokens=12)
    for options in ({}, {"gamma": 2}):
        draft = jspec.load_drafter(tmp_path, MODEL, **options)
        ours = jspec.generate(MODEL, draft, text, max_new_tokens=12)
        assert ours.tokens == plain.tokens


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 48}, "width 48 with 61 tokens, but tiny has width 32 and 61"),
        ({"num_heads": 2}, "up.weight is .15, 32., the config asks for .10, 32."),
        ({"wide": 0}, "wide must be an integer >= 1"),
    ],
)
def test_other_heads_are_refused(change, message, tmp_path):
    save_blockwise(weights(IDS), tmp_path, 61)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=message):
        read_blockwise(tmp_path, MODEL)
