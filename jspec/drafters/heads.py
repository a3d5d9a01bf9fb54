"""Heads that guess several tokens from one feature of the target.

The feature is the hidden state from which the pending token was decided: the target's
last one, after the final norm, of the token before the pending one. The target's own
head reads the pending token from it, head ``k`` (from 0) the token ``k + 1`` places
after that one. The only state is the feature, which every verification leaves behind.

Medusa-1 and the blockwise heads of Stern et al. are here; the heads of
``jspec.drafters.hydra`` read the drafted path too, those of
``jspec.drafters.multi_token`` are whole layers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jspec import tree
from jspec.drafters.feature_heads import check, tree_drafter
from jspec.drafters.growth import Grower
from jspec.models.linear import linear
from jspec.tree import Topology
from jspec.types import Array, Drafter

# Medusa


@struct.dataclass
class MedusaHead:
    """``weight [M, M]`` and ``bias [M]`` of the residual block, ``vocab [V', M]``."""

    weight: Array
    bias: Array
    vocab: Array


@struct.dataclass
class Medusa:
    """Medusa-1 heads.

    Attributes:
      heads: one each for the tokens 1, 2, ... after the pending one.
      to_target: ``[V']`` int32, head row -> target id, or None where they agree.
      layers: static, how often a head applies its residual block. The original code
        repeats one block, so its weights are shared.
    """

    heads: tuple[MedusaHead, ...]
    to_target: Array | None = None
    layers: int = struct.field(pytree_node=False, default=1)


def init_medusa(vocab: Array, count: int, layers: int = 1) -> Medusa:
    """Heads that start as the target's own head ``vocab [V', M]``: all else is zero."""
    width = vocab.shape[1]
    head = MedusaHead(
        weight=jnp.zeros((width, width), vocab.dtype),
        bias=jnp.zeros(width, vocab.dtype),
        vocab=vocab,
    )
    return Medusa((head,) * count, layers=layers)


def medusa_output(weights: Medusa, k: int, feature: Array) -> Array:
    """Output ``[..., M]`` of head ``k`` (from 0) on ``feature [..., M]``.

    Its product with the head's ``vocab`` is the logits. ``x + silu(W x + b)``. Source:
    Cai et al. 2401.10774, section 2.1.1.
    """
    head = weights.heads[k]
    for _ in range(weights.layers):
        feature = feature + jax.nn.silu(linear(feature, head.weight, head.bias))
    return feature


def medusa(
    weights: Medusa, vocab_size: int, topology: Topology | Grower = tree.MEDUSA_63
) -> Drafter:
    """Drafts with Medusa heads; the weights are the drafter's params.

    All nodes of a depth take their tokens from the same list, that head's best. Source:
    Cai et al. 2401.10774; exact rules accept here what the paper accepts by typicality
    (``jspec.verify.lossy.typical``).

    Args:
      weights: the heads.  vocab_size: the target's vocabulary.
      topology: which combinations of guesses to verify.

    Raises:
      ValueError: a tree that is deeper than there are heads or wider than their
        vocabulary, or a draft vocabulary that does not fit.
    """
    vocab = weights.heads[0].vocab
    grower = check(weights, len(weights.heads), vocab, vocab_size, topology)
    return tree_drafter(_medusa_guess, grower, vocab_size)


def _medusa_guess(weights: Medusa, k: int, feature: Array, path: Array) -> Array:
    del path
    output = medusa_output(weights, k, feature)
    return linear(output, weights.heads[k].vocab)[:, None]


# Blockwise heads


@struct.dataclass
class Blockwise:
    """The proposal heads of blockwise parallel decoding: one layer, K outputs.

    Attributes:
      up: ``[K * I, M]``.  up_bias: ``[K * I]``.
      down: ``[K, M, K * I]``.  down_bias: ``[K, M]``.
      vocab: ``[V', M]``, shared by all heads: the target's own.
      to_target: as in ``Medusa``.
    """

    up: Array
    up_bias: Array
    down: Array
    down_bias: Array
    vocab: Array
    to_target: Array | None = None


def init_blockwise(key: Array, vocab: Array, count: int, wide: int) -> Blockwise:
    """``count`` heads with ``wide`` hidden units each that start as ``vocab [V', M]``."""
    width = vocab.shape[1]
    scale = width**-0.5
    return Blockwise(
        up=scale * jax.random.normal(key, (count * wide, width), vocab.dtype),
        up_bias=jnp.zeros(count * wide, vocab.dtype),
        down=jnp.zeros((count, width, count * wide), vocab.dtype),
        down_bias=jnp.zeros((count, width), vocab.dtype),
        vocab=vocab,
    )


def blockwise_output(weights: Blockwise, k: int | Array, feature: Array) -> Array:
    """Output ``[..., M]`` of head ``k`` (from 0) on ``feature [..., M]``.

    Its product with ``vocab`` is the logits. One hidden layer for all heads and a
    residual connection to each output. Source: Stern et al. 1811.03115, section 6.
    """
    hidden = jax.nn.relu(linear(feature, weights.up, weights.up_bias))
    return feature + linear(hidden, weights.down[k], weights.down_bias[k])


def blockwise(
    weights: Blockwise, vocab_size: int, topology: Topology | Grower | None = None
) -> Drafter:
    """Drafts with blockwise heads, without a tree of its own a chain of their best.

    The paper's p_1 is the target itself and its p_2 the first head here, so that the
    base law stays what it is. Source: Stern et al. 1811.03115.

    Args:
      weights: the heads.  vocab_size: the target's vocabulary.
      topology: which combinations of guesses to verify; None is a chain of one token a
        head.

    Raises:
      ValueError: as ``medusa``.
    """
    count = weights.down.shape[0]
    topology = tree.line(count) if topology is None else topology
    grower = check(weights, count, weights.vocab, vocab_size, topology)
    return tree_drafter(_blockwise_guess, grower, vocab_size)


def _blockwise_guess(weights: Blockwise, k: int, feature: Array, path: Array) -> Array:
    del path
    return linear(blockwise_output(weights, k, feature), weights.vocab)[:, None]
