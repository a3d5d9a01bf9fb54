"""Prediction modules and their losses against recordings and loops."""

import dataclasses
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent.parent / "drafters"))

from parity import CLOSE, DATA, ids, recorded

from jspec.drafters import eagle
from jspec.drafters.published_mtp import load_mtp
from jspec.testing import tiny
from jspec.train.mtp import Texts, fast_mtp, prediction, unroll

pytestmark = pytest.mark.usefixtures("highest_precision")


@pytest.fixture
def highest_precision():
    with jax.default_matmul_precision("highest"):
        yield


def module_of(name):
    """A recorded module with the embedding and the head it was run with."""
    stranger = tiny.model(vocab_size=96, hidden=32)
    modules, shared = load_mtp(DATA / name, stranger), recorded(name, "teacher")
    embed, head = (
        jnp.asarray(shared[f"{k}.weight"]) for k in ("embed_tokens", "lm_head")
    )
    weights = dataclasses.replace(modules.weights[0], embed=embed, head=head)
    return modules.design, weights


def texts_of(io):
    token = ids(io["in.input_ids"])
    return Texts(
        hidden=jnp.asarray(io["in.hidden_states"]),
        token=token,
        document=jnp.zeros_like(token),
        position=jnp.arange(token.shape[1])[None],
        mask=jnp.asarray(io["in.loss_mask"]) > 0,
    )


@pytest.mark.parametrize("name", ["spec_mtp_qwen3", "spec_mtp_qwen3_next"])
def test_speculators(name):
    (design, weights), io = module_of(name), recorded(name)
    given = texts_of(io)
    assert fast_mtp() == pytest.approx((0.5102, 0.3061, 0.1837), abs=1e-4)
    for k, out in enumerate(unroll(design, (weights,), given, 3)):
        logits = eagle.logits(design, weights, out)
        np.testing.assert_allclose(logits, io[f"out.logits.{k}"], **CLOSE)
    loss, metrics = prediction(design, (weights,), given, fast_mtp())
    np.testing.assert_allclose(loss, io["out.loss"][0], rtol=1e-5)
    assert {f"loss_{k}" for k in range(3)} <= metrics.keys()
