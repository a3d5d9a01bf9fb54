"""The loss of an independent small model, distilled from its target."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from jspec.models.linear import linear
from jspec.sampling import argmax
from jspec.train import objectives
from jspec.train.chunked import summed
from jspec.train.eagle import shifted
from jspec.train.features import extract
from jspec.train.objectives import Divergence
from jspec.train.packing import Rows
from jspec.types import Array, Target


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

    def sums(hidden, feature, judged):
        q, p = linear(hidden, product), linear(feature, head)
        fixed = lax.stop_gradient(q)
        values = (
            divergence(p, q),
            argmax(fixed) == argmax(p),
            objectives.overlap(p, fixed),
        )
        return [jnp.sum(jnp.where(judged, x, 0.0)) for x in values]

    flat = (x.reshape(judged.size, -1) for x in (out.hidden, rows.hidden))
    found = jnp.stack(summed(sums, *flat, judged.ravel()))
    loss, accuracy, acceptance = found / jnp.maximum(jnp.sum(judged), 1)
    return loss, {"accuracy": accuracy, "acceptance": acceptance}
