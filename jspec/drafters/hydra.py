"""Hydra: heads that also read the tokens drafted before theirs.

Ankner et al. 2402.05109, the MLP form. Head ``k`` sees the target's feature and the
embeddings of the pending token and of the path below it, so a tree holds guesses that
go together, at the price of one head forward for every inner node.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jspec import tree
from jspec.drafters.feature_heads import check, tree_drafter
from jspec.drafters.growth import Grower
from jspec.models.linear import linear, looked_up
from jspec.tree import Topology
from jspec.types import Array, Drafter


@struct.dataclass
class HydraHead:
    """Head ``k`` (from 0), whose input has ``k + 2`` parts of width M.

    Attributes:
      weight, skip: ``[M, (k + 2) * M]``.  bias, skip_bias: ``[M]``.
      vocab: ``[V', M]``.
    """

    weight: Array
    bias: Array
    skip: Array
    skip_bias: Array
    vocab: Array


@struct.dataclass
class Hydra:
    """Hydra heads.

    Attributes:
      heads: one each for the tokens 1, 2, ... after the pending one.
      embed: ``[V, M]``, the target's embedding.
      to_target: ``[V']`` int32, head row -> target id, or None where they agree.
    """

    heads: tuple[HydraHead, ...]
    embed: Array
    to_target: Array | None = None


def init_hydra(embed: Array, vocab: Array, count: int) -> Hydra:
    """Heads that start as the target's own head ``vocab [V', M]``, blind to the path."""
    width, dtype = vocab.shape[1], vocab.dtype

    def head(k: int) -> HydraHead:
        return HydraHead(
            weight=jnp.zeros((width, (k + 2) * width), dtype),
            bias=jnp.zeros(width, dtype),
            skip=jnp.eye(width, (k + 2) * width, dtype=dtype),
            skip_bias=jnp.zeros(width, dtype),
            vocab=vocab,
        )

    return Hydra(tuple(head(k) for k in range(count)), embed)


def hydra_output(weights: Hydra, k: int, feature: Array, path: Array) -> Array:
    """Output ``[..., M]`` of head ``k`` (from 0) after ``path [..., k + 1]``.

    Its product with the head's ``vocab`` is the logits. With ``u`` the feature followed
    by the embeddings of the path's tokens, pending token first: ``S u + s + silu(W u +
    b)``. Source: Ankner et al. 2402.05109, section 3.

    Args:
      weights: the heads.  k: which.
      feature: ``[..., M]`` of the token before the path.
      path: ``[..., k + 1]`` int32 tokens.
    """
    head = weights.heads[k]
    embeddings = looked_up(weights.embed, path, feature.dtype)
    embeddings = embeddings.reshape(*path.shape[:-1], -1)
    u = jnp.concatenate([feature, embeddings], -1)
    x = linear(u, head.skip, head.skip_bias)
    return x + jax.nn.silu(linear(u, head.weight, head.bias))


def hydra(
    weights: Hydra, vocab_size: int, topology: Topology | Grower = tree.MEDUSA_63
) -> Drafter:
    """Drafts with Hydra heads; the weights are the drafter's params.

    Args and errors are those of ``jspec.drafters.medusa``.
    """
    vocab = weights.heads[0].vocab
    grower = check(weights, len(weights.heads), vocab, vocab_size, topology)
    return tree_drafter(_guess, grower, vocab_size)


def _guess(weights: Hydra, k: int, feature: Array, path: Array) -> Array:
    paths = path.shape[1]
    each = jnp.repeat(feature[:, None], paths, axis=1)
    return linear(hydra_output(weights, k, each, path), weights.heads[k].vocab)
