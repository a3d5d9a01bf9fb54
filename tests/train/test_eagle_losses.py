"""EAGLE-3's training-time test against recordings of two libraries."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent.parent / "drafters"))

from parity import CLOSE, DATA, ids, recorded

from jspec.drafters import eagle
from jspec.drafters.published_eagle import load_eagle
from jspec.models.linear import linear
from jspec.models.transformer import rms_norm
from jspec.testing import tiny
from jspec.train import objectives
from jspec.train.eagle import EAGLE3, Pairs, training_time_test, unroll

pytestmark = pytest.mark.usefixtures("highest_precision")


@pytest.fixture
def highest_precision():
    with jax.default_matmul_precision("highest"):
        yield


def head_of(name):
    """A recorded head; its target is not recorded, so a stranger of its sizes stands in."""
    target = tiny.model(vocab_size=96, hidden=32, layers=6)
    return load_eagle(DATA / name, target)


def speculators_pairs(name, head):
    """Its loader shifts the rows: entry t holds f_t, x_{t+1} and the state after it."""
    io, teacher = recorded(name), recorded(name, "teacher")
    last = jnp.asarray(io["in.verifier_last_hidden_states"])
    last = rms_norm(
        last, jnp.asarray(teacher["verifier_norm.weight"]), head.design.config
    )
    document = ids(io["in.document_ids"])
    return io, Pairs(
        features=jnp.asarray(io["in.hidden_states"]),
        token=ids(io["in.input_ids"]),
        teacher=linear(last, jnp.asarray(teacher["verifier_lm_head.weight"])),
        total=jnp.zeros(document.shape),  # its loss looks at the head's ids alone
        mask=jnp.asarray(io["in.loss_mask"]),
        document=document,
        position=ids(io["in.position_ids"]),
    )


@pytest.mark.parametrize("name", ["spec_eagle3_llama", "spec_eagle3_qwen3_2l_fcnorm"])
def test_speculators(name):
    head = head_of(name)
    io, given = speculators_pairs(name, head)
    supervised = np.asarray(given.document[0]) >= 0
    for s, out in enumerate(unroll(head.design, head.weights, given, 3)):
        logits = np.asarray(eagle.logits(head.design, head.weights, out))[0]
        np.testing.assert_allclose(
            logits[supervised], io[f"out.logits.{s}"][0][supervised], **CLOSE
        )
    loss, _ = training_time_test(
        head.design,
        head.weights,
        given,
        steps=3,
        decay=0.9,
        objective=objectives.over_counted(objectives.forward_kl),
        across_documents=True,
    )
    np.testing.assert_allclose(loss, io["out.loss"][0], rtol=1e-5)


SPECFORGE = {
    "None": EAGLE3,
    "alpha": objectives.lk_alpha,
    "lambda": objectives.lk_lambda(),
}


@pytest.mark.parametrize("name", SPECFORGE)
def test_specforge(name):
    head, io = head_of("specforge_eagle3"), recorded("specforge_eagle3")
    full = jnp.asarray(io["in.target"])  # all inputs as its wrapper takes them: shifted
    to_target = head.weights.to_target
    known = jnp.isin(jnp.argmax(full, -1), to_target)
    token = ids(io["in.input_ids"])
    given = Pairs(
        features=jnp.asarray(io["in.hidden_states"]),
        token=token,
        teacher=full[..., to_target],
        total=jax.nn.logsumexp(full, -1),
        mask=known & (jnp.asarray(io["in.loss_mask"])[..., 0] > 0),
        document=jnp.zeros_like(token),
        position=jnp.arange(token.shape[1])[None],
    )
    for s, out in enumerate(unroll(head.design, head.weights, given, 3)):
        logits = eagle.logits(head.design, head.weights, out)
        np.testing.assert_allclose(logits, io[f"out.logits.{s}"], **CLOSE)
    loss, _ = training_time_test(
        head.design, head.weights, given, steps=3, objective=SPECFORGE[name]
    )
    np.testing.assert_allclose(loss, io[f"out.loss.{name}"][0], rtol=1e-5)
