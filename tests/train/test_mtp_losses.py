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

from jspec import types
from jspec.drafters import eagle, growth, mtp
from jspec.drafters.published_mtp import load_mtp
from jspec.testing import tiny
from jspec.train.mtp import Texts, deepseek, fast_mtp, prediction, unroll
from jspec.train.starts import fresh_mtp

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


TARGET = tiny.model(seed=3)
VOCAB, WIDTH = TARGET.config.vocab_size, TARGET.config.hidden


def two_modules():
    every = [fresh_mtp(TARGET, jax.random.key(m)) for m in range(2)]
    return every[0].design, tuple(m.weights[0] for m in every)


def random_texts(lengths, total):
    """A row of documents of these lengths, and padding."""
    rng = np.random.default_rng(len(lengths))
    document = np.repeat([*range(len(lengths)), -1], [*lengths, total - sum(lengths)])
    position = np.concatenate([np.arange(n) for n in (*lengths, total - sum(lengths))])
    return Texts(
        hidden=jnp.asarray(rng.normal(size=(1, total, WIDTH)), jnp.float32),
        token=ids(rng.integers(0, VOCAB, (1, total))),
        document=ids(document[None]),
        position=ids(position[None]),
        mask=jnp.asarray(rng.random((1, total)) < 0.7),
    )


def test_documents_of_a_row_are_apart():
    """Counted label by label, every document by itself."""
    (design, modules), steps = two_modules(), 3
    packed = random_texts((9, 6), 20)
    losses, hits, counts = np.zeros(steps), np.zeros(steps), np.zeros(steps)
    for start, end in ((0, 9), (9, 15)):
        alone = Texts(*(x[:, start:end] for x in packed))
        pad = [(0, 0), (0, steps + 1)]  # so that the last labels have rows
        given = Texts(
            jnp.pad(alone.hidden, (*pad, (0, 0))), *(jnp.pad(x, pad) for x in alone[1:])
        )
        for k, out in enumerate(unroll(design, modules, given, steps)):
            logits = eagle.logits(design, modules[k % 2], out)[0]
            for t in range(end - start - k - 2):
                if alone.mask[0, t + k + 2]:
                    label = int(alone.token[0, t + k + 2])
                    losses[k] -= jax.nn.log_softmax(logits[t])[label]
                    hits[k] += int(logits[t].argmax()) == label
                    counts[k] += 1
    losses, hits = losses / counts, hits / counts
    for weights in (deepseek(steps, 0.3), fast_mtp(steps, 0.5)):
        loss, metrics = prediction(design, modules, packed, weights)
        np.testing.assert_allclose(loss, np.dot(weights, losses), rtol=1e-5)
        for k in range(steps):
            np.testing.assert_allclose(metrics[f"loss_{k}"], losses[k], rtol=1e-5)
            np.testing.assert_allclose(metrics[f"accuracy_{k}"], hits[k], atol=1e-5)
    assert deepseek(3, 0.3) == pytest.approx((0.1, 0.1, 0.1))
    assert fast_mtp(3, 0.5) == pytest.approx((4 / 7, 2 / 7, 1 / 7))


def test_labels_outside_the_draft_vocabulary_do_not_count():
    design, (weights, _) = two_modules()
    known = np.random.default_rng(0).permutation(VOCAB)[:40]
    some = dataclasses.replace(
        weights, head=weights.head[known], to_target=jnp.asarray(known)
    )
    given, depths = random_texts((40,), 40), (1.0,)
    loss, metrics = prediction(design, (some,), given, depths)
    (out,) = unroll(design, (weights,), given, 1)
    log_q = jax.nn.log_softmax(eagle.logits(design, weights, out)[0][:, known])
    label, counts = np.asarray(given.token[0, 2:]), np.asarray(given.mask[0, 2:])
    rows = [(t, list(known).index(x)) for t, x in enumerate(label) if x in known]
    rows = [(t, at) for t, at in rows if counts[t]]
    assert 0 < len(rows) < counts.sum()
    want = -np.mean([log_q[t, at] for t, at in rows])
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    hits = np.mean([int(log_q[t].argmax()) == at for t, at in rows])
    np.testing.assert_allclose(metrics["accuracy_0"], hits, atol=1e-5)


def test_modules_are_trained_as_they_draft():
    """Depth ``k`` of training is what module ``k`` makes of the same committed tokens."""
    design, modules = two_modules()
    given = random_texts((14,), 14)
    drafter = mtp.drafter(design, growth.chain(2), 2)
    trained = list(unroll(design, modules, given, 2))
    for length in (3, 7, 12):
        context = types.Context(given.token, jnp.array([length]), None, given.hidden)
        state = drafter.init(modules, context)
        for k in range(2):
            row = trained[k][0, length - 2 - k]
            np.testing.assert_allclose(state.out[0, k], row, **CLOSE)


def test_texts_too_short_and_weights_out_of_range():
    design, modules = two_modules()
    with pytest.raises(
        ValueError, match="3 steps need texts of at least 5 tokens, got 4"
    ):
        next(unroll(design, modules, random_texts((4,), 4), 3))
    with pytest.raises(ValueError, match="0 steps, beta 0.6"):
        fast_mtp(0)
    with pytest.raises(ValueError, match="beta 0;"):
        fast_mtp(3, 0)
    with pytest.raises(ValueError, match="0 depths"):
        deepseek(0)
