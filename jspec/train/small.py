"""An independent small model, distilled from its target."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.models import Config, Model, architecture
from jspec.models.config import Rope
from jspec.models.linear import linear
from jspec.sampling import argmax
from jspec.train import objectives
from jspec.train.eagle import shifted
from jspec.train.features import extract
from jspec.train.objectives import Divergence
from jspec.train.packing import Rows
from jspec.types import Array, Target

ROWS = 256  # positions whose logits are in memory at once


def distillation(
    student: Target,
    params: Any,
    product: Array,
    head: Array,
    rows: Rows,
    divergence: Divergence = objectives.forward_kl,
) -> tuple[Array, dict[str, Array]]:
    """The mean divergence of the student's law from the target's over answer tokens.

    On text that the target wrote this is DistillSpec with the target's own samples.
    Source: Zhou et al. 2310.08461, section 3.

    Args:
      student, params: the small model.
      product: ``[V, m]`` its vocabulary product.  head: ``[V, M]`` the target's.
      rows: with the target's hidden states.
      divergence: of ``jspec.train.objectives``.

    Returns:
      The loss; ``accuracy``, how often both have the same best token, and ``acceptance``,
      the mean probability that a sampled draft is accepted.
    """
    out = extract(params, rows.tokens, rows.document, rows.position, target=student)
    judged = shifted(rows.mask, 1) & (shifted(rows.document, 1, -1) == rows.document)
    parts = [
        jnp.pad(x.reshape(judged.size, -1), [(0, -judged.size % ROWS), (0, 0)])
        for x in (out.hidden, rows.hidden, judged)
    ]

    @jax.checkpoint
    def chunk(total, part):
        hidden, feature, judged = part
        q, p = linear(hidden, product), linear(feature, head)
        fixed = lax.stop_gradient(q)
        values = (
            divergence(p, q),
            argmax(fixed) == argmax(p),
            objectives.overlap(p, fixed),
        )
        sums = [jnp.sum(jnp.where(judged[:, 0], x, 0.0)) for x in values]
        return total + jnp.stack(sums), None

    chunks = tuple(x.reshape(-1, ROWS, x.shape[-1]) for x in parts)
    sums, _ = lax.scan(chunk, jnp.zeros(3), chunks)
    loss, accuracy, acceptance = sums / jnp.maximum(jnp.sum(judged), 1)
    return loss, {"accuracy": accuracy, "acceptance": acceptance}


def fresh(
    target: Model, key: Array, *, hidden: int, layers: int, head_dim: int
) -> Model:
    """A small Llama over the target's tokens, tied, one key/value head, random layers.

    Its embedding is the target's, projected on the directions in which that varies most.

    Raises:
      ValueError: ``hidden`` is not a multiple of ``head_dim`` or exceeds the target's.
    """
    given = target.config
    if hidden % head_dim or hidden > given.hidden:
        raise ValueError(
            f"hidden {hidden} must be a multiple of head_dim {head_dim} and at most the "
            f"target's {given.hidden}"
        )
    config = Config(
        family="llama",
        vocab_size=given.vocab_size,
        hidden=hidden,
        layers=layers,
        heads=hidden // head_dim,
        kv_heads=1,
        head_dim=head_dim,
        intermediate=-(-hidden * 8 // 3 // 64) * 64,
        tie_embeddings=True,
        query_scale=head_dim**-0.5,
        windows=(None,) * layers,
        ropes=(Rope(),) * layers,
        max_position=given.max_position,
        eos_ids=given.eos_ids,
        bos_id=given.bos_id,
    )
    params = architecture.init(config, key)
    embed = np.asarray(target.params.embed, np.float32)
    _, directions = np.linalg.eigh(embed.T @ embed)  # ascending
    projected = jnp.asarray(embed @ directions[:, -hidden:])
    params = dataclasses.replace(params, embed=projected)
    return Model(
        name=f"{target.name}-small",
        target=architecture.target(config),
        params=params,
        tokenizer=target.tokenizer,
        dtype=jnp.dtype(jnp.float32),
    )
