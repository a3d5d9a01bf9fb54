"""What EAGLE heads are trained on: EAGLE-1's regression, EAGLE-3's training-time test."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax

from jspec.drafters import eagle
from jspec.drafters.eagle import Design, Weights
from jspec.models import rope
from jspec.models.linear import linear
from jspec.models.transformer import output, project
from jspec.sampling import argmax
from jspec.train import objectives
from jspec.train.objectives import Judged, Objective
from jspec.train.packing import Rows
from jspec.types import Array

_MASKED = -1e30
EAGLE3 = objectives.over_all(objectives.cross_entropy)


class Pairs(NamedTuple):
    """Rows aligned as a head reads them: entry ``t`` joins ``f_t`` and ``x_{t+1}``.

    Attributes:
      features: ``[B, T, F]`` true features ``f_t``.
      token: ``[B, T]`` ``x_{t+1}``.
      teacher: ``[B, T, V']`` the target's logits after ``x_{t+1}``, over the head's ids.
      total: ``[B, T]`` their logsumexp over all ids.
      mask: ``[B, T]`` whether the teacher of this entry counts.
      document, position: ``[B, T]`` of entry ``t``; any origin of positions will do.
    """

    features: Array
    token: Array
    teacher: Array
    total: Array
    mask: Array
    document: Array
    position: Array


def pairs(rows: Rows, taps: Array, head: Array, ids: Array | None) -> Pairs:
    """Pairs from packed rows and the target's features.

    The teacher of entry ``t`` says what follows ``x_{t+1}``, so it counts where ``x_{t+2}``
    is a token of an answer in the same document, and where the target's best token is in
    the head's vocabulary.

    Args:
      rows: with ``hidden``.
      taps: ``[B, T, F]`` the features the head reads.
      head: ``[V, M]`` the target's.
      ids: ``[V']`` the head's vocabulary as target ids, or None for all.
    """
    feature = shifted(rows.hidden, 1)
    logits = linear(feature, head).astype(jnp.float32)
    label = shifted(rows.mask, 2) & (shifted(rows.document, 2, -1) == rows.document)
    mask = label & (rows.document >= 0)
    total = jax.nn.logsumexp(logits, -1)
    if ids is not None:
        known = jnp.zeros(head.shape[0], bool).at[ids].set(True)
        mask &= known[argmax(logits)]
        # A second product costs a tenth of gathering columns, and leaves rows in order.
        logits = linear(feature, head[ids]).astype(jnp.float32)
    return Pairs(
        taps, shifted(rows.tokens, 1), logits, total, mask, rows.document, rows.position
    )


def training_time_test(
    design: Design,
    weights: Weights,
    given: Pairs,
    *,
    steps: int = 7,
    decay: float = 0.8,
    objective: Objective = EAGLE3,
    across_documents: bool = False,
) -> tuple[Array, dict[str, Array]]:
    """EAGLE-3's loss: the head is run on its own outputs, as it will be when drafting.

    ``sum_s decay^s loss_s``; row ``t`` of step ``s`` has true features up to ``t`` and
    its own outputs after that, and is judged by the teacher ``s`` entries later. Source:
    Li et al. 2503.01840, section 3.2.

    Args:
      design, weights, given: the head and its rows.
      steps, decay: how far it runs on its own outputs, and the weight of every step.
      objective: the loss of one step.
      across_documents: also count teachers that belong to the next document of a row, as
        the speculators library does.

    Returns:
      The loss, and per step ``accuracy_s``, the share of counted positions where head and
      teacher have the same best token, and ``acceptance_s``, the mean probability that a
      sampled draft is accepted.
    """
    total, metrics, best = jnp.float32(0), {}, argmax(given.teacher)
    for s, out in enumerate(unroll(design, weights, given, steps)):
        size = out.shape[1] - s
        student = eagle.logits(design, weights, out[:, :size])
        mask = given.mask[:, s:]
        if not across_documents:
            mask &= given.document[:, s:] == given.document[:, :size]
        judged = Judged(
            given.teacher[:, s:], given.total[:, s:], student, mask, given.mask.size
        )
        total += decay**s * objective(judged)
        seen = _seen(judged, best[:, s:])
        metrics |= {f"{name}_{s}": x for name, x in seen.items()}
    return total, metrics


def _seen(judged: Judged, best: Array) -> dict[str, Array]:
    """How often head and teacher, whose best is ``best [B, t]``, agree; no gradient."""
    student = lax.stop_gradient(judged.student)
    judged = judged._replace(student=student)
    # The largest value is much cheaper than where it is.
    same = jnp.take_along_axis(student, best[..., None], -1)[..., 0] >= student.max(-1)
    return {
        "accuracy": objectives.over_masked(same, judged.mask),
        "acceptance": objectives.over_masked(
            objectives.acceptance(judged), judged.mask
        ),
    }


def unroll(
    design: Design, weights: Weights, given: Pairs, steps: int
) -> Iterator[Array]:
    """The head's outputs ``[B, T, M]`` at every step; gradients flow through all."""
    config, token = design.config, given.token
    hidden = design.read(design, weights, given.features)
    causal = jnp.tril(jnp.ones(token.shape[-1:] * 2, bool))
    seen = causal & (given.document[:, :, None] == given.document[:, None, :])
    stored: list[list[tuple[Array, Array]]] = [[] for _ in weights.layers]
    for s in range(steps):
        turns = {
            r: rope.turns(r, config.head_dim, given.position + s)
            for r in set(config.ropes)
        }

        def attention(i: int, h: Array, turns=turns) -> Array:
            layer, turn = weights.layers[i], turns[config.ropes[i]]
            q, k, v, gate = project(config, layer, h)
            stored[i].append((rope.rotate(k, turn), v))
            a = _attend_own(rope.rotate(q, turn) * config.query_scale, stored[i], seen)
            return output(layer, a, gate)

        out = eagle.body(design, weights, weights.embed[token], hidden, attention)
        yield out
        hidden, token = eagle.feed(design, weights, out), shifted(token, 1)


def _attend_own(q: Array, stored: list[tuple[Array, Array]], seen: Array) -> Array:
    """Row ``t`` sees true rows up to ``t``, and of every later step its own row alone.

    ``q [B, T, H, D]``, keys and values ``[B, T, K, D]``, ``seen [B, T, T]``; gives
    ``[B, T, H, D]``. One softmax over both.
    """
    (k, v), size, kv_heads = stored[0], q.shape[1], stored[0][0].shape[2]
    rows = rearrange(q, "b t (k g) d -> b k (g t) d", k=kv_heads)
    seen = jnp.tile(seen, (1, q.shape[2] // kv_heads, 1))[:, None]
    scores = jnp.einsum("bkrd,bskd->bkrs", rows, k).astype(jnp.float32)
    scores = jnp.where(seen, scores, _MASKED)
    q = rearrange(rows, "b k (g t) d -> b k g t d", t=size)
    later = [
        jnp.einsum("bkgtd,btkd->bkgt", q, k).reshape(scores.shape[:-1])
        for k, _ in stored[1:]
    ]
    # Joined to the scores they would be one softmax, and a copy of all of them.
    top = lax.stop_gradient(functools.reduce(jnp.maximum, later, scores.max(-1)))
    weights = jnp.exp(scores - top[..., None])
    a, total = jnp.einsum("bkrs,bskd->bkrd", weights, v), weights.sum(-1)
    for score, (_, v) in zip(later, stored[1:], strict=True):
        weight = jnp.exp(score - top)
        own = jnp.tile(rearrange(v, "b t k d -> b k t d"), (1, 1, q.shape[2], 1))
        a, total = a + weight[..., None] * own, total + weight
    return rearrange(a / total[..., None], "b k (g t) d -> b t (k g) d", t=size)


def regression(
    design: Design,
    weights: Weights,
    given: Pairs,
    truth: Array,
    key: Array,
    *,
    noise: float = 0.2,
    head_weight: float = 0.1,
) -> tuple[Array, dict[str, Array]]:
    """EAGLE-1's loss: the next feature, and what the head makes of it.

    ``SmoothL1(out_t, f_{t+1}) + head_weight CE``, with uniform noise of width
    ``noise 512 / T`` on the features read. Source: Li et al. 2401.15077, section 4.2, and
    its training code.

    Args:
      truth: ``[B, T, M]`` the feature of entry ``t + 1``, ``f_{t+1}``.
      key: for the noise.
    """
    width = noise * 512 / given.token.shape[1]
    shake = (jax.random.uniform(key, given.features.shape) - 0.5) * width
    (out,) = unroll(design, weights, given._replace(features=given.features + shake), 1)
    student = eagle.logits(design, weights, out)
    feature = objectives.over_masked(objectives.smooth_l1(out, truth), given.mask)
    judged = Judged(given.teacher, given.total, student, given.mask, given.mask.size)
    law = objectives.over_counted(objectives.cross_entropy)(judged)
    seen = _seen(judged, argmax(given.teacher))
    metrics = {f"{name}_0": x for name, x in seen.items()}
    metrics |= {"feature": feature, "law": law}
    return feature + head_weight * law, metrics


def shifted(x: Array, by: int, fill=0) -> Array:
    """``x [B, T, ...]`` shifted ``by`` entries to the left, filled at the end."""
    pad = [(0, 0)] * x.ndim
    pad[1] = (0, by)
    return jnp.pad(x[:, by:], pad, constant_values=fill)
