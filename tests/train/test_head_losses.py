"""Losses of heads against loops over labels, and against torch's gradients."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jspec
from jspec.drafters import heads
from jspec.drafters.hydra import Hydra, HydraHead, hydra_output
from jspec.drafters.multi_token import init_multi_token
from jspec.testing import tiny
from jspec.train import chunked
from jspec.train import heads as losses

B, T, M, V, K = 2, 9, 8, 11, 3
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, V, (B, T))
MASK = RNG.random((B, T)) < 0.7
DOCUMENT = np.array([[0] * 5 + [1] * 4, [0] * 2 + [1] * 6 + [-1]])


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


HIDDEN = normal(B, T, M)
MEDUSA = heads.Medusa(
    tuple(heads.MedusaHead(normal(M, M), normal(M), normal(V, M)) for _ in range(K))
)
BLOCKWISE = heads.Blockwise(
    normal(12, M), normal(12), normal(K, M, 12), normal(K, M), normal(V, M)
)
HYDRA = Hydra(
    tuple(
        HydraHead(
            normal(M, (k + 2) * M),
            normal(M),
            normal(M, (k + 2) * M),
            normal(M),
            normal(V, M),
        )
        for k in range(K)
    ),
    embed=normal(V, M),
)


def head_loop(logits, ahead, document=None, to_target=None):
    """Mean loss, accuracy and count over labels that are looked up one by one.

    ``logits(b, t)`` is a row over the draft vocabulary.
    """
    ids = list(range(V)) if to_target is None else list(to_target)
    total, right, count = 0.0, 0, 0
    for b in range(B):
        for t in range(T - ahead):
            if not MASK[b, t + ahead] or TOKENS[b, t + ahead] not in ids:
                continue
            if document is not None and document[b, t] != document[b, t + ahead]:
                continue
            row = np.asarray(logits(b, t), np.float64)
            label = ids.index(TOKENS[b, t + ahead])
            total -= row[label] - np.log(np.sum(np.exp(row)))
            right += int(row.argmax() == label)
            count += 1
    return total / count, right / count, count


def medusa_row(k, weights=MEDUSA):
    vocab = weights.heads[k].vocab
    return lambda b, t: vocab @ heads.medusa_output(weights, k, HIDDEN[b, t])


def blockwise_row(k):
    vocab = BLOCKWISE.vocab
    return lambda b, t: vocab @ heads.blockwise_output(BLOCKWISE, k, HIDDEN[b, t])


def hydra_row(k):
    def row(b, t):
        path = jnp.asarray(TOKENS[b, t + 1 : t + 2 + k])
        return HYDRA.heads[k].vocab @ hydra_output(HYDRA, k, HIDDEN[b, t], path)

    return row


def judge_all(row, **options):
    return np.array([head_loop(row(k), 2 + k, **options) for k in range(K)]).T


def agrees(metrics, expected):
    for name, values in zip(("loss", "accuracy", "count"), expected, strict=True):
        np.testing.assert_allclose(metrics[name], values, rtol=1e-5)


WEIGHTS_08 = np.array([0.8, 0.64, 0.512])
FAMILIES = {
    "medusa": (losses.medusa, MEDUSA, medusa_row, WEIGHTS_08),
    "hydra": (losses.hydra, HYDRA, hydra_row, WEIGHTS_08),
    "blockwise": (losses.blockwise, BLOCKWISE, blockwise_row, np.full(K, 1 / K)),
}


@pytest.mark.parametrize(
    ("document", "rows"), [(None, 256), (DOCUMENT, 5)], ids=["whole", "packed"]
)
@pytest.mark.parametrize("name", FAMILIES)
def test_losses_equal_loops(name, document, rows, monkeypatch):
    monkeypatch.setattr(chunked, "ROWS", rows)  # 18 positions: in four parts or at once
    loss, weights, row, factors = FAMILIES[name]
    got, metrics = jax.jit(loss)(weights, HIDDEN, TOKENS, MASK, document)
    expected = judge_all(row, document=document)
    assert (expected[2] > 0).all()
    agrees(metrics, expected)
    np.testing.assert_allclose(got, factors @ expected[0], rtol=1e-5)


def test_labels_outside_a_draft_vocabulary_are_left_out():
    to_target = np.array([7, 2, 9, 0, 4])
    small = MEDUSA.replace(
        heads=tuple(h.replace(vocab=h.vocab[:5]) for h in MEDUSA.heads),
        to_target=jnp.asarray(to_target),
    )

    _, metrics = jax.jit(losses.medusa)(small, HIDDEN, TOKENS, MASK)
    expected = judge_all(lambda k: medusa_row(k, small), to_target=to_target)
    assert (expected[2] > 0).all() and (expected[2] < judge_all(medusa_row)[2]).all()
    agrees(metrics, expected)


def test_medusa_gradients_equal_torch():
    def torch_loss(leaves, hidden):
        total = 0
        for k in range(K):
            w, b, vocab = leaves[3 * k : 3 * k + 3]
            x = hidden + torch.nn.functional.silu(hidden @ w.T + b)
            labels = torch.from_numpy(np.where(MASK, TOKENS, -100))[:, 2 + k :]
            logits = (x @ vocab.T)[:, : T - 2 - k]
            entropy = torch.nn.functional.cross_entropy(
                logits.reshape(-1, V), labels.reshape(-1)
            )
            total = total + 0.8 ** (k + 1) * entropy
        return total

    def torch_leaf(x):
        return torch.tensor(np.asarray(x), requires_grad=True)

    leaves = list(map(torch_leaf, jax.tree.leaves(MEDUSA)))
    hidden = torch_leaf(HIDDEN)
    expected = torch_loss(leaves, hidden)
    expected.backward()

    def loss(weights, hidden):
        return losses.medusa(weights, hidden, TOKENS, MASK)[0]

    grad = jax.jit(jax.value_and_grad(loss, (0, 1)))
    got, (by_weights, by_hidden) = grad(MEDUSA, HIDDEN)
    np.testing.assert_allclose(got, expected.item(), rtol=1e-5)
    np.testing.assert_allclose(by_hidden, hidden.grad, rtol=1e-4, atol=1e-6)
    for ours, theirs in zip(jax.tree.leaves(by_weights), leaves, strict=True):
        np.testing.assert_allclose(ours, theirs.grad, rtol=1e-4, atol=1e-6)


def test_the_joint_loss_adds_the_targets_own():
    logits = normal(B, T, V)
    joint = jax.jit(functools.partial(losses.medusa_joint, share=0.3))
    got, metrics = joint(MEDUSA, logits, HIDDEN, TOKENS, MASK, DOCUMENT)
    own = head_loop(lambda b, t: logits[b, t], 1, DOCUMENT)
    of_heads = judge_all(medusa_row, document=DOCUMENT)
    agrees(metrics, np.concatenate([np.array([own]).T, of_heads], 1))
    expected = own[0] + 0.3 * WEIGHTS_08 @ of_heads[0]
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_a_drawn_head_is_one_of_the_losses_and_all_are_drawn():
    sampled = jax.jit(losses.blockwise_sampled)
    every = judge_all(blockwise_row)
    drawn = []
    for seed in range(60):
        got, metrics = sampled(
            BLOCKWISE, HIDDEN, TOKENS, MASK, key=jax.random.key(seed)
        )
        k = int(np.flatnonzero(metrics["count"])[0])
        drawn.append(k)
        np.testing.assert_allclose(got, every[0, k], rtol=1e-5)
        agrees(metrics, np.where(np.arange(K) == k, every, 0))
    # Sixty fair draws of three: each between 8 and 32 but for 1e-4 of all seeds.
    assert all(8 <= drawn.count(k) <= 32 for k in range(K))


# Layers as heads

MODEL = tiny.model(seed=2, layers=3, vocab_size=V, windows=(None, None, 3))
CONFIG = MODEL.config


def trunk(tokens):
    """Output of the layers below the last one, and the target's logits."""
    block = jspec.chain(jnp.asarray(tokens))
    cache = MODEL.target.init_cache(len(tokens), T, jnp.float32)
    tap = CONFIG.layers - 1
    out = MODEL.target.score(MODEL.params, cache, block, taps=(tap,))
    return out.features, out.logits


def test_layers_that_are_the_targets_last_are_judged_by_its_logits():
    features, logits = trunk(TOKENS)
    weights = init_multi_token(MODEL.params, 2)
    got, metrics = losses.multi_token(weights, features, TOKENS, MASK, config=CONFIG)
    expected = [head_loop(lambda b, t: logits[b, t], 2 + k) for k in range(2)]
    agrees(metrics, np.array(expected).T)
    np.testing.assert_allclose(got, sum(e[0] for e in expected), rtol=1e-5)


def test_packed_texts_do_not_see_each_other():
    layers = tiny.model(seed=5, layers=2, vocab_size=V).params.layers
    weights = init_multi_token(MODEL.params, 2).replace(layers=layers)
    tokens, features = RNG.integers(0, V, (2, 6)), normal(2, 6, CONFIG.hidden)
    judge = jax.jit(functools.partial(losses.multi_token, weights, config=CONFIG))

    def metrics(tokens, features, document=None):
        return judge(features, tokens, np.ones(tokens.shape, bool), document)[1]

    apart = metrics(tokens, features)
    document = np.array([[4] * 6 + [7] * 6])
    packed = metrics(tokens.reshape(1, 12), features.reshape(1, 12, -1), document)
    for name, x in apart.items():
        np.testing.assert_allclose(packed[name], x, rtol=1e-5)


@pytest.mark.parametrize("count", [1, 4])
def test_memory_never_holds_the_logits_of_a_head(count, monkeypatch):
    monkeypatch.setattr(chunked, "ROWS", 16)
    wide, length = 4096, 64
    weights = heads.init_medusa(jnp.zeros((wide, M)), count)

    def loss(weights, hidden, tokens):
        return losses.medusa(weights, hidden, tokens, tokens == 0)[0]

    shapes = jax.eval_shape(
        lambda: (weights, jnp.zeros((1, length, M)), jnp.zeros((1, length), jnp.int32))
    )
    program = jax.jit(jax.grad(loss)).lower(*shapes).compile()
    whole = 4 * length * wide  # bytes
    assert program.memory_analysis().temp_size_in_bytes < 0.7 * whole


def test_the_gradient_of_parts_is_that_of_the_whole(monkeypatch):
    def gradient(rows):
        monkeypatch.setattr(chunked, "ROWS", rows)
        return jax.jit(jax.grad(lambda w: losses.medusa(w, HIDDEN, TOKENS, MASK)[0]))(
            MEDUSA
        )

    chex.assert_trees_all_close(gradient(5), gradient(256), rtol=1e-4, atol=1e-6)
