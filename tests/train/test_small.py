"""Distillation against loops in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.testing import tiny
from jspec.train.chunked import ROWS
from jspec.train.features import stream
from jspec.train.packing import Rows
from jspec.train.small import distillation
from jspec.train.starts import fresh_small

TARGET = tiny.model(seed=4)
STUDENT = fresh_small(TARGET, jax.random.key(0), hidden=16, layers=1, head_dim=8)


def rows(length=ROWS + 7):
    """Two documents and padding; so long that logits come in two parts."""
    rng = np.random.default_rng(0)
    first, second = length // 2, length // 3
    document = np.full((1, length), -1, np.int32)
    document[0, :first], document[0, first : first + second] = 0, 1
    position = np.zeros_like(document)
    position[0, :first] = np.arange(first)
    position[0, first : first + second] = np.arange(second)
    tokens = rng.integers(61, size=(1, length)).astype(np.int32)
    mask = (document >= 0) & (rng.random((1, length)) < 0.7)
    return Rows(tokens * (document >= 0), document, position, mask)


def law(model, ids):
    cache = model.target.init_cache(1, 1, jnp.float32)
    block = jspec.chain(jnp.asarray(ids)[None])
    logits = model.target.score(model.params, cache, block).logits[0]
    return np.asarray(jax.nn.softmax(logits.astype(jnp.float32), -1), np.float64)


def test_the_loss_is_the_loops():
    given = rows()
    batch = stream(TARGET.params, lambda _: given, target=TARGET.target)(0)
    params = STUDENT.params
    head = TARGET.params.head
    loss, seen = distillation(STUDENT.target, params, params.embed, head, batch)
    kl, same, overlap = [], [], []
    for number in (0, 1):
        at = np.flatnonzero(given.document[0] == number)
        ids = given.tokens[0, at]
        p, q = law(TARGET, ids), law(STUDENT, ids)
        for t in range(len(at) - 1):
            if given.mask[0, at[t + 1]]:
                kl.append(np.sum(p[t] * np.log(p[t] / q[t])))
                same.append(p[t].argmax() == q[t].argmax())
                overlap.append(np.minimum(p[t], q[t]).sum())
    np.testing.assert_allclose(loss, np.mean(kl), rtol=1e-4)
    np.testing.assert_allclose(seen["accuracy"], np.mean(same), rtol=1e-5)
    np.testing.assert_allclose(seen["acceptance"], np.mean(overlap), rtol=1e-4)


def test_the_embedding_keeps_what_varies_most():
    ours, theirs = np.asarray(STUDENT.params.embed), np.asarray(TARGET.params.embed)
    singular = np.linalg.svd(theirs, compute_uv=False)
    np.testing.assert_allclose(
        np.linalg.svd(ours, compute_uv=False), singular[:16], rtol=1e-4
    )
    with pytest.raises(ValueError, match="hidden 12 must be a multiple of head_dim 8"):
        fresh_small(TARGET, jax.random.key(0), hidden=12, layers=1, head_dim=8)
