"""Prediction modules against transformers' own, and their folders."""

import functools

import jax
import jax.numpy as jnp
import mtp_oracle as oracle
import numpy as np
import pytest
import torch
from transformers.cache_utils import MtpCache

import jspec
from jspec import types
from jspec.drafters import growth, mtp
from jspec.drafters.published_mtp import load_mtp

TEXT = np.random.default_rng(0).integers(3, 101, (1, 14))
SETTINGS = {
    "deepseek-1": ("deepseek_v3", 1),
    "deepseek-3": ("deepseek_v3", 3),
    "glm-1": ("glm4_moe", 1),
    "glm-2": ("glm4_moe", 2),
    "mimo": ("mimo", 1),
}
GAMMA = 4


@functools.cache
def random(name):
    return oracle.build(*SETTINGS[name])


@pytest.fixture(params=SETTINGS)
def case(request, tmp_path):
    """Target and modules of transformers, and both as loaded from one checkpoint."""
    theirs = random(request.param)
    folder = oracle.save(*theirs, tmp_path)
    target = jspec.load(folder, dtype="float32")
    return *theirs, target, load_mtp(folder, target)


def greedy(gamma):
    """A chain of best guesses that carries the logits instead of a law."""

    def grow(extend, at, logits, key, sampling):
        tokens, every, row = [], [logits], jnp.zeros((1, 1), jnp.int32)
        for _ in range(gamma - 1):
            tokens.append(jnp.argmax(every[-1], -1)[:, None])
            logits, at = extend(at, tokens[-1], row)
            every.append(logits[:, 0])
        tokens.append(jnp.argmax(every[-1], -1)[:, None])
        token = jnp.concatenate(tokens, 1)
        parent = jnp.arange(gamma)[None]
        live = jnp.ones_like(token, bool)
        q = jnp.pad(jnp.stack(every, 1), ((0, 0), (0, 1), (0, 0)))
        return growth.Grown(token, parent, live, q, jnp.zeros(token.shape))

    return growth.Grower(gamma + 1, gamma, grow, dense=True)


def after(tokens, count, features=None):
    """What a drafter sees of the first ``count`` tokens."""
    return types.Context(jnp.asarray(tokens), jnp.array([count]), None, features)


def accepted(tokens, features, start, count):
    """Feedback that commits ``count`` tokens of a text from ``start`` on."""
    nodes = GAMMA + 1
    block = types.chain(jnp.asarray(tokens[:, start - 1 : start - 1 + nodes]))
    path = jnp.where(jnp.arange(nodes) < count, jnp.arange(nodes), -1)[None]
    verdict = types.Verdict(
        path, jnp.array([count - 1]), jnp.asarray(tokens[:, start + count - 1])
    )
    rows = features[:, start - 1 : start - 1 + nodes]
    return types.Feedback(block, verdict, None, rows)


def test_drafts_are_those_of_transformers(case):
    hf, theirs, target, modules = case
    count = len(modules.weights)
    drafter = mtp.drafter(modules.design, greedy(GAMMA), count)
    features = oracle.hidden(hf, TEXT)
    ours = jnp.asarray(features.numpy())
    quick = {"xla_backend_optimization_level": 0}
    propose, update = (
        jax.jit(f, compiler_options=quick) for f in (drafter.propose, drafter.update)
    )
    params = modules.params
    for start, steps in ((2, (1, 3)), (6, (2, 1))):
        state = drafter.init(params, after(TEXT, start, ours))
        for step in (*steps, 0):
            block, state = propose(params, state, None, after(TEXT, start))
            text = TEXT[0, :start].tolist()
            tokens, logits = oracle.draft(theirs, features, text, GAMMA)
            np.testing.assert_allclose(
                block.law.q[0, :-1], logits, rtol=1e-4, atol=1e-4
            )
            assert block.token[0].tolist() == [text[-1], *tokens]
            if step:
                feedback = accepted(TEXT, ours, start, step)
                state = update(params, state, feedback)
                start += step


def test_the_loop_is_what_transformers_drafts(case):
    """As many drafts as there are modules; transformers drafts no further."""
    hf, theirs, _, modules = case
    count, features = len(modules.weights), oracle.hidden(hf, TEXT)
    ids = torch.tensor(TEXT)
    with torch.no_grad():
        tokens, logits, _ = theirs(
            ids[:, 1:],
            features[:, :-1],
            None,
            torch.arange(1, ids.shape[1])[None],
            MtpCache(config=hf.config.get_mtp_config()),
        )
    ours, own = oracle.draft(theirs, features, TEXT[0].tolist(), count)
    assert tokens[0].tolist() == ours
    np.testing.assert_allclose(own, logits[0], rtol=1e-4, atol=1e-4)
