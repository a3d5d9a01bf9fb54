"""Blocks in training: recorded forwards and losses of two libraries, and no leaks."""

import dataclasses
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent.parent / "drafters"))

from parity import CLOSE, DATA, ids, recorded

from jspec.drafters import dspark
from jspec.drafters.diffusion import logits
from jspec.drafters.published_dflash import load_dflash
from jspec.models.linear import linear
from jspec.models.transformer import rms_norm
from jspec.testing import tiny
from jspec.train import block_losses as losses
from jspec.train import dflash

pytestmark = pytest.mark.usefixtures("highest_precision")
TARGET = tiny.model(vocab_size=96, hidden=32, layers=6)


@pytest.fixture
def highest_precision():
    with jax.default_matmul_precision("highest"):
        yield


def head_of(name, embed, head):
    """A recorded drafter, joined to the recorded embedding and head of its target."""
    params = TARGET.params.replace(embed=jnp.asarray(embed), head=jnp.asarray(head))
    return load_dflash(DATA / name, dataclasses.replace(TARGET, params=params))


def texts(io, document=None):
    token = ids(io["in.input_ids"])
    if document is None:
        document = jnp.zeros_like(token)
    position = jnp.arange(token.shape[1])[None]
    if "in.position_ids" in io:
        position = ids(io["in.position_ids"])
    return dflash.Texts(
        features=jnp.asarray(io["in.hidden_states"]),
        token=token,
        document=document,
        position=position,
        mask=jnp.asarray(io["in.loss_mask"]) > 0,
    )


SPECULATORS = (
    "spec_dflash",
    "spec_dflash_draftvocab",
    "spec_dspark_vanilla",
    "spec_dspark_gated",
)


@pytest.mark.parametrize("name", SPECULATORS)
def test_speculators(name):
    """Its labels are the teacher's best tokens; its mask is recorded."""
    io, given_by = recorded(name), recorded(name, "teacher")
    own = (
        np.zeros((96, 32), np.float32)
        if "draftvocab" in name
        else given_by["lm_head.weight"]
    )
    head = head_of(name, given_by["embed_tokens.weight"], own)
    design, weights = head.design, head.weights
    given = texts(io, ids(io["in.document_ids"]))
    anchor = jnp.append(ids(io["in.anchors"]), 0)[None]
    blocks = dflash.Blocks(anchor, jnp.arange(4)[None] < 3)
    rows = dflash.hidden_rows(design, weights, given, blocks)
    real = np.arange(12)
    got = rows.reshape(16, -1)
    np.testing.assert_allclose(got[real], io["out.hidden"][0][real], **CLOSE)
    base = logits(design, weights, got)
    np.testing.assert_allclose(base[real], io["out.base_logits"][0][real], **CLOSE)

    last = rms_norm(
        jnp.asarray(io["in.verifier_last_hidden_states"]),
        jnp.asarray(given_by["verifier_norm.weight"]),
        design.config,
    )
    teacher = jnp.asarray(given_by["verifier_lm_head.weight"])
    label = dflash.aims(design, weights, given, blocks).label
    truth = linear(last[0][label[0] - 1], teacher)
    mask = jnp.asarray(io["out.loss_mask"]).reshape(1, 4, 4)
    np.testing.assert_allclose(
        truth[mask[0]], io["out.targets"].reshape(4, 4, -1)[mask[0]], **CLOSE
    )
    aim = dflash.Aim(label, jnp.argmax(truth, -1)[None], mask)
    rated = dflash.rate(design, weights, given, blocks, aim, last=last, teacher=teacher)
    weight = mask * losses.decay(design, 4.0)
    if name == "spec_dflash":
        loss = losses.cross_entropy(rated, weight, mask, losses.over_rows)
    else:  # the draft vocabulary was recorded with DSpark's mixture, too
        loss = losses.spark(rated, weight, mask, losses.over_rows, rejection=0.9)
    if weights.joint is not None:
        previous = ids(io["out.prev_tokens"])
        z, e = dspark.codes(design.link, weights.joint, previous, rows[0])
        bias = linear(z, weights.joint.after)
        np.testing.assert_allclose(bias[:3], io["out.markov_bias"][:3], **CLOSE)
        np.testing.assert_allclose(
            rated.doubt[0, :3], io["out.confidence"][:3], **CLOSE
        )
    np.testing.assert_allclose(loss, io["out.loss"][0], rtol=1e-5)


@pytest.mark.parametrize("name", ["specforge_dflash", "specforge_dspark_vanilla"])
def test_specforge(name):
    io = recorded(name)
    head = head_of(name, io["teacher.embed"], io["teacher.lm_head"])
    design, weights, given = head.design, head.weights, texts(io)
    blocks = dflash.Blocks(ids(io["in.anchors"]), jnp.ones((1, 3), bool))
    rows = dflash.hidden_rows(design, weights, given, blocks)
    np.testing.assert_allclose(rows.reshape(1, 12, -1), io["out.hidden"], **CLOSE)
    aim = dflash.aims(design, weights, given, blocks)
    if weights.joint is None:
        rated = dflash.rate(design, weights, given, blocks, aim)
        weight = aim.valid * losses.decay(design, 7.0)
        loss = losses.cross_entropy(rated, weight, aim.valid)
    else:
        last = jnp.asarray(io["in.target_last_hidden_states"])
        rated = dflash.rate(
            design, weights, given, blocks, aim, last=last, teacher=weights.head
        )
        mask = losses.unbroken(aim.valid)
        loss = losses.spark(rated, mask * losses.decay(design, 4.0), mask)
    np.testing.assert_allclose(loss, io["out.loss"][0], rtol=1e-5)


def test_domino():
    """Recorded with a quarter of the loss on the block before its correction."""
    io = recorded("specforge_domino")
    head = head_of("specforge_domino", io["teacher.embed"], io["teacher.lm_head"])
    design, weights, given = head.design, head.weights, texts(io)
    blocks = dflash.Blocks(ids(io["in.anchors"]), jnp.ones((1, 3), bool))
    rows = dflash.hidden_rows(design, weights, given, blocks)
    np.testing.assert_allclose(rows.reshape(1, 12, -1), io["out.hidden"], **CLOSE)
    aim = dflash.aims(design, weights, given, blocks)
    plain = dataclasses.replace(design, link=None), weights.replace(joint=None)
    final, base = (
        dflash.rate(d, w, given, blocks, aim) for d, w in ((design, weights), plain)
    )
    weight = aim.valid.astype(jnp.float32)
    loss = losses.corrected(final, base, weight, aim.valid, share=0.25)
    np.testing.assert_allclose(loss, io["out.loss"][0], rtol=1e-5)


def blocks_of(kind, **changes):
    """A drafter over random features, its text in two documents, and its anchors."""
    head = head_of("specforge_dspark_vanilla", TARGET.params.embed, TARGET.params.head)
    design = dataclasses.replace(head.design, **changes)
    key = jax.random.key(2)
    token = jax.random.randint(key, (1, 20), 0, 96)
    document = jnp.asarray([[0] * 11 + [1] * 8 + [-1]])
    features = jax.random.normal(key, (1, 20, 64))
    position = jnp.asarray([[*range(11), *range(8), 0]])
    given = dflash.Texts(features, token, document, position, document >= 0)
    blocks = dflash.Blocks(
        jnp.asarray([[4, 13, 15]]), jnp.asarray([[True, True, kind]])
    )
    return design, head.weights, given, blocks


@pytest.mark.parametrize("window", [None, 3])
def test_blocks_see_only_the_text_before_them(window):
    """Features at or after an anchor, and of other documents, have no gradient at all."""
    design, weights, given, blocks = blocks_of(False)
    config = dataclasses.replace(design.config, windows=(window, None))
    design = dataclasses.replace(design, config=config)

    def rows(features):
        moved = given._replace(features=features)
        return dflash.hidden_rows(design, weights, moved, blocks)[0].sum((-1, -2))

    slope = jnp.abs(jax.jacobian(rows)(given.features)[:, 0]).sum(-1)  # [N, T]
    reach = np.asarray(slope) > 0
    seen = np.zeros((3, 20), bool)
    seen[0, :4] = seen[1, 11:13] = True  # the third is not kept
    np.testing.assert_array_equal(reach, seen)


def test_a_block_in_training_is_the_block_of_decoding():
    from jspec import cache as kv_cache
    from jspec.drafters import diffusion
    from jspec.drafters.dflash import inject

    design, weights, given, blocks = blocks_of(True)
    config = design.config
    rows = dflash.hidden_rows(design, weights, given, blocks)
    for n, (start, at) in enumerate([(0, 4), (11, 13), (11, 15)]):
        cache = kv_cache.init(2, 1, config.kv_heads, config.head_dim, 16, jnp.float32)
        path, count = jnp.arange(at - start)[None], jnp.array([at - start])
        features = given.features[:, start:at]
        cache = inject(design, weights, cache, features, path, count)
        anchor = given.token[:, at]
        alone = diffusion.forward(design, weights, cache, anchor, design.block)
        np.testing.assert_allclose(rows[0, n], alone[0], rtol=1e-4, atol=1e-5)


def test_anchors_are_random_and_lie_in_answers():
    given = blocks_of(True)[2]
    given = given._replace(mask=given.mask.at[:, :3].set(False))
    able = {*range(3, 10), *range(11, 18)}  # the token after it counts as well
    found = set()
    for step in range(30):
        blocks = dflash.random_anchors(jax.random.key(step), given, 4)
        anchors = np.asarray(blocks.anchor[0])
        assert blocks.keep.all() and (np.diff(anchors) > 0).all()
        found |= set(anchors.tolist())
    assert found == able
    few = dflash.random_anchors(jax.random.key(0), given, 20)
    assert int(few.keep.sum()) == len(able)
    assert set(np.asarray(few.anchor[0])[np.asarray(few.keep[0])].tolist()) == able


@pytest.mark.parametrize("next_token", [True, False])
def test_aims(next_token):
    design, weights, given, blocks = blocks_of(True, next_token=next_token)
    ids = jnp.arange(0, 96, 2)
    given = given._replace(token=given.token.at[0, 6].set(4))
    weights = weights.replace(to_target=ids)
    aim = dflash.aims(design, weights, given, blocks)
    for n, at in enumerate([4, 13, 15]):
        for k in range(design.block):
            label = at + k + next_token
            real = label < 19 and (k > 0 or next_token)
            token = int(given.token[0, label]) if real else 1
            assert bool(aim.valid[0, n, k]) == (real and token % 2 == 0)
            if aim.valid[0, n, k]:
                assert int(ids[aim.token[0, n, k]]) == token


def test_dpace_is_the_expected_number_of_guesses_left():
    q = np.array([0.9, 0.2, 0.5, 0.7])
    valid = np.array([True, True, False, True])
    s = np.where(valid, 0.5 * q + 0.5, 1.0)
    reached = np.cumprod(s) * valid
    expected = [reached[k:].sum() * valid[k] for k in range(4)]
    rated = dflash.Rated(-jnp.log(jnp.asarray(q))[None, None], jnp.zeros((1, 1, 4)))
    got = losses.dpace(rated, jnp.asarray(valid)[None, None])
    np.testing.assert_allclose(got[0, 0], expected, rtol=1e-6)
    assert not jax.grad(
        lambda x: losses.dpace(dflash.Rated(x, x), jnp.ones(4, bool)).sum()
    )(jnp.ones(4)).any()
