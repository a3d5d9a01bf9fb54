"""Penalties and constraints of a block against a loop over nodes in plain numpy."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec import sampling as smp
from jspec.tree import ancestors
from jspec.types import Block

INF = np.inf


def make(batch=1, vocab=12, eos_ids=(2,), **kwargs):
    return smp.options(batch, vocab_size=vocab, eos_ids=eos_ids, **kwargs)


def normal(seed, shape, scale=2.0):
    return np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32)


def block_of(token, parent):
    """A block and its mask from ``[B, N]`` arrays."""
    token, parent = np.asarray(token, np.int32), np.asarray(parent, np.int32)
    parent = np.broadcast_to(parent, token.shape)
    on = np.ones(token.shape, bool)
    return Block(token, parent, on, on), ancestors(jnp.asarray(parent))


def reference_process(z, o, prompt, output, drafted):
    """One row ``[V]`` of logits after everything, given its whole history as lists."""
    z = z.astype(np.float64)
    for token, value in o.get("logit_bias", {}).items():
        z[token] += value
    for token in set(prompt + output + drafted):
        r = o.get("repetition_penalty", 1.0)
        z[token] = z[token] * r if z[token] < 0 else z[token] / r
    new = output + drafted
    for token in set(new):
        z[token] -= o.get("presence_penalty", 0.0)
        z[token] -= o.get("frequency_penalty", 0.0) * new.count(token)
    z[list(o.get("forbidden_tokens", []))] = -INF
    if len(new) < o.get("min_new_tokens", 0):
        z[2] = -INF
    if len(new) in o.get("forced_tokens", {}):
        forced = o["forced_tokens"][len(new)]
        z = np.where(np.arange(len(z)) == forced, 0.0, -INF)
    return z


SETTINGS = {
    "none": {},
    "bias": {"logit_bias": {1: 2.5, 5: -INF, 7: -1.0}},
    "repetition": {"repetition_penalty": 1.3},
    "reward": {"repetition_penalty": 0.7},
    "presence": {"presence_penalty": 0.6},
    "frequency": {"frequency_penalty": -0.4},
    "forbidden": {"forbidden_tokens": [0, 11]},
    "minimum": {"min_new_tokens": 5},
    "forced": {"forced_tokens": {4: 9, 5: 2}},
    "all": {
        "logit_bias": {1: 2.5, 5: -INF},
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "forbidden_tokens": [0],
        "min_new_tokens": 5,
        "forced_tokens": {6: 1},
    },
}
CHAIN = [-1, 0, 1, 2, 3]
TREE = [-1, 0, 0, 1, 1, 3, 2]
process = jax.jit(smp.process)
LIST_OPTIONS = ("logit_bias", "forbidden_tokens", "forced_tokens")
FILL = {"repetition_penalty": 1.0}


def check_process(rows, parent, seed):
    """Compares ``process`` with a loop over nodes; ``rows`` has options for each row."""
    rng = np.random.default_rng(seed)
    batch, nodes, vocab = len(rows), len(parent), 12
    start, length = rng.integers(1, 5, batch), rng.integers(6, 9, batch)
    tokens = rng.integers(0, vocab, (batch, 16)).astype(np.int32)
    tokens[np.arange(16) >= length[:, None]] = 10**6  # undefined slots
    drafted = rng.integers(0, vocab, (batch, nodes))
    drafted[:, 0] = tokens[np.arange(batch), length - 1]
    block, mask = block_of(drafted, parent)
    z = normal(seed, (batch, nodes, vocab))
    names = {name for row in rows for name in row}
    kwargs = {
        n: [row.get(n, None if n in LIST_OPTIONS else FILL.get(n, 0)) for row in rows]
        for n in names
    }
    o = make(batch, vocab, **kwargs)
    got = process(z, o, tokens, length, start, block, mask)
    assert got.dtype == jnp.float32
    for b in range(batch):
        text = tokens[b, : length[b]].tolist()
        for i in range(nodes):
            path = [int(drafted[b, j]) for j in range(1, nodes) if mask[b, i, j]]
            prompt, output = text[: start[b]], text[start[b] :]
            want = reference_process(z[b, i].copy(), rows[b], prompt, output, path)
            np.testing.assert_allclose(got[b, i], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("parent", [CHAIN, TREE, [-1]], ids=["chain", "tree", "root"])
@pytest.mark.parametrize("name", SETTINGS)
def test_process_equals_a_loop_over_nodes(name, parent):
    check_process([SETTINGS[name]], parent, seed=3)


def test_process_of_a_mixed_batch():
    check_process(list(SETTINGS.values()), TREE, seed=4)


@settings(deadline=None, max_examples=20)
@given(st.data())
def test_process_of_any_tree(data):
    parent = [-1] + [data.draw(st.integers(0, i)) for i in range(5)]
    rows = [SETTINGS[data.draw(st.sampled_from(sorted(SETTINGS)))] for _ in range(3)]
    check_process(rows, parent, seed=data.draw(st.integers(0, 99)))


def test_process_casts_up_and_changes_nothing_when_nothing_is_asked():
    z = jnp.asarray(normal(0, (1, 1, 12)), jnp.bfloat16)
    block, mask = block_of([[3]], [[-1]])
    tokens = np.zeros((1, 4), np.int32)
    got = process(z, make(), tokens, np.array([2]), np.array([1]), block, mask)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, z.astype(jnp.float32))


def test_no_value_of_an_option_retraces():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def law(z, o, tokens, length, start, block, mask):
        return smp.law(z, o, tokens, length, start, block, mask)

    z = normal(0, (1, 7, 12))
    block, mask = block_of(np.ones((1, 7)), TREE)
    args = np.zeros((1, 9), np.int32), np.array([5]), np.array([2]), block, mask
    cuts = {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 5, "top_p": 0.9}
    for o in [*SETTINGS.values(), *cuts]:
        law(z, make(temperature=0.5, seed=len(o), **o), *args)
    law(z, make(), *args)
