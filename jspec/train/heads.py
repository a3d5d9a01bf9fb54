"""Losses of heads that guess several tokens from one feature.

All are functions ``loss(weights, hidden, tokens, mask, ...) -> (scalar, metrics)`` of

    hidden  [B, T, M] target features, position by position
    tokens  [B, T] int32, the text
    mask    [B, T], 1 where a token is to be predicted, 0 elsewhere

and, where a row holds several texts, ``document [B, T]``, a number for each. Head ``k``
(from 0) reads the feature of position ``t`` and its label is token ``t + 2 + k`` of the
same document; the mask that counts is the label's. A head's loss is the mean
cross-entropy over its labels. Labels outside a draft vocabulary are left out.

``metrics`` holds arrays with one entry a head: ``loss``, ``accuracy`` (of the best token)
and ``count`` (labels).

Logits are formed for some positions at a time (``train.chunked``), and anew in the backward pass, so that
not even one head's ``[B, T, V']`` is ever in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jspec.drafters.heads import Blockwise, Medusa, blockwise_output, medusa_output
from jspec.drafters.hydra import Hydra, hydra_output
from jspec.drafters.multi_token import MultiToken, empty_cache, multi_token_forward
from jspec.models.config import Config
from jspec.models.linear import linear
from jspec.sampling import argmax
from jspec.train.chunked import summed
from jspec.train.draft_rows import draft_rows
from jspec.types import Array

Metrics = dict[str, Array]
Result = tuple[Array, Metrics]


def medusa(
    weights: Medusa,
    hidden: Array,
    tokens: Array,
    mask: Array,
    document: Array | None = None,
    *,
    decay: float = 0.8,
) -> Result:
    """``sum_k decay^(k+1) CE_k``, Medusa-1. Source: Cai et al. 2401.10774, section 2.2.1.

    ``decay = 1`` is the unweighted sum of the original code.
    """
    outputs = [medusa_output(weights, k, hidden) for k in range(len(weights.heads))]
    vocabs = [head.vocab for head in weights.heads]
    metrics = _judge(outputs, vocabs, weights.to_target, tokens, mask, document)
    return _discounted(metrics, decay), metrics


def medusa_joint(
    weights: Medusa,
    logits: Array,
    hidden: Array,
    tokens: Array,
    mask: Array,
    document: Array | None = None,
    *,
    share: float = 0.2,
    decay: float = 0.8,
) -> Result:
    """``L_LM + share * L_Medusa``, to train the target along with its heads, Medusa-2.

    ``logits [B, T, V]`` and ``hidden`` are what the target's own forward gives, so that
    gradients reach it. The first entry of the metrics is the target's own head. Source:
    Cai et al. 2401.10774, section 2.2.2; ``share`` is its lambda_0.
    """
    own, lm = next_token(logits, tokens, mask, document)
    loss, heads = medusa(weights, hidden, tokens, mask, document, decay=decay)
    metrics = {name: jnp.append(lm[name], heads[name]) for name in heads}
    return own + share * loss, metrics


def hydra(
    weights: Hydra,
    hidden: Array,
    tokens: Array,
    mask: Array,
    document: Array | None = None,
    *,
    decay: float = 0.8,
) -> Result:
    """``sum_k decay^(k+1) CE_k`` with the text's own tokens as the drafted path.

    Source: Ankner et al. 2402.05109, section 3, with the factors of Medusa-1.
    """
    count = len(weights.heads)
    after = jnp.stack([jnp.roll(tokens, -1 - k, axis=1) for k in range(count)], -1)
    outputs = [
        hydra_output(weights, k, hidden, after[..., : k + 1]) for k in range(count)
    ]
    vocabs = [head.vocab for head in weights.heads]
    metrics = _judge(outputs, vocabs, weights.to_target, tokens, mask, document)
    return _discounted(metrics, decay), metrics


def blockwise(
    weights: Blockwise,
    hidden: Array,
    tokens: Array,
    mask: Array,
    document: Array | None = None,
) -> Result:
    """The mean of the heads' cross-entropies. Source: Stern et al. 1811.03115, section 6."""
    count = weights.down.shape[0]
    outputs = [blockwise_output(weights, k, hidden) for k in range(count)]
    vocabs = [weights.vocab] * count
    metrics = _judge(outputs, vocabs, weights.to_target, tokens, mask, document)
    return jnp.mean(metrics["loss"]), metrics


def blockwise_sampled(
    weights: Blockwise,
    hidden: Array,
    tokens: Array,
    mask: Array,
    document: Array | None = None,
    *,
    key: Array,
) -> Result:
    """The cross-entropy of one head, drawn uniformly with ``key``.

    Its expectation is ``blockwise``, at the cost of a single vocabulary product. The
    metrics of the other heads are zero. Source: Stern et al. 1811.03115, section 6.
    """
    count = weights.down.shape[0]
    k = jax.random.randint(key, (), 0, count)
    labels = _labels(tokens, mask, document, 2 + k)
    output = blockwise_output(weights, k, hidden)
    one = _cross_entropy(output, weights.vocab, weights.to_target, *labels)
    only = jnp.arange(count) == k
    return one["loss"], {name: jnp.where(only, x, 0) for name, x in one.items()}


def multi_token(
    weights: MultiToken,
    hidden: Array,
    tokens: Array,
    mask: Array,
    document: Array | None = None,
    *,
    config: Config,
) -> Result:
    """The sum of the heads' cross-entropies, all of weight 1.

    ``hidden`` is the trunk's output, ``config`` the target's. The paper's first head, the
    next token's, is the target's last layer: add ``next_token`` of its logits to train
    them together. Source: Gloeckle et al. 2404.19737, section 2.
    """
    batch, length = tokens.shape
    place = jnp.arange(length)
    sees = jnp.broadcast_to(place <= place[:, None], (batch, length, length))
    if document is not None:
        sees &= document[:, :, None] == document[:, None, :]
    cache = empty_cache(weights, config, batch, 1, hidden.dtype)
    output, _ = multi_token_forward(weights, hidden, cache, config, sees)
    count = len(weights.layers)
    outputs, vocabs = [output[:, :, k] for k in range(count)], [weights.vocab] * count
    metrics = _judge(outputs, vocabs, weights.to_target, tokens, mask, document)
    return jnp.sum(metrics["loss"]), metrics


def next_token(
    logits: Array, tokens: Array, mask: Array, document: Array | None = None
) -> Result:
    """Mean cross-entropy of ``logits [B, T, V]`` at ``t`` with token ``t + 1``.

    The metrics are scalars.
    """
    labels, judged = _labels(tokens, mask, document, 1)
    loss, right = _sums(logits, labels, judged)
    metrics = _means(loss, right, jnp.sum(judged))
    return metrics["loss"], metrics


def _judge(
    outputs: Sequence[Array],
    vocabs: Sequence[Array],
    to_target: Array | None,
    tokens: Array,
    mask: Array,
    document: Array | None,
) -> Metrics:
    """Metrics of all heads from their outputs ``[B, T, M]`` and products ``[V', M]``."""
    each = [
        _cross_entropy(x, vocab, to_target, *_labels(tokens, mask, document, 2 + k))
        for k, (x, vocab) in enumerate(zip(outputs, vocabs, strict=True))
    ]
    return {name: jnp.stack([m[name] for m in each]) for name in each[0]}


def _labels(
    tokens: Array, mask: Array, document: Array | None, ahead: int | Array
) -> tuple[Array, Array]:
    """The token ``ahead`` places on, ``[B, T]``, and whether it is to be predicted."""
    labels = jnp.roll(tokens, -ahead, axis=1)
    judged = jnp.roll(mask.astype(bool), -ahead, axis=1)
    judged &= jnp.arange(tokens.shape[1]) < tokens.shape[1] - ahead
    if document is not None:
        judged &= jnp.roll(document, -ahead, axis=1) == document
    return labels, judged


def _cross_entropy(
    x: Array, vocab: Array, to_target: Array | None, labels: Array, judged: Array
) -> Metrics:
    """Metrics of the logits ``vocab x``, which are formed some positions at a time."""
    labels, known = draft_rows(labels, to_target, vocab.shape[0])
    judged &= known
    loss, right = summed(
        lambda x, labels, judged: _sums(linear(x, vocab), labels, judged),
        x.reshape(labels.size, -1),
        labels.ravel(),
        judged.ravel(),
    )
    return _means(loss, right, jnp.sum(judged))


def _sums(logits: Array, labels: Array, judged: Array) -> tuple[Array, Array]:
    """Summed cross-entropy and hits of ``logits [..., V']`` where ``judged [...]``."""
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    entropy = jax.nn.logsumexp(logits, axis=-1) - chosen
    hit = judged & (argmax(logits) == labels)
    return jnp.sum(jnp.where(judged, entropy, 0)), jnp.sum(hit, dtype=jnp.int32)


def _means(loss: Array, right: Array, count: Array) -> Metrics:
    """Means over ``count`` labels, 0 without any."""
    some = jnp.maximum(count, 1)
    return {"loss": loss / some, "accuracy": right / some, "count": count}


def _discounted(metrics: Metrics, decay: float) -> Array:
    loss = metrics["loss"]
    return jnp.sum(loss * decay ** (1 + jnp.arange(loss.shape[0])))
