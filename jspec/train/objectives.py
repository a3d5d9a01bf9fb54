"""Divergences between a teacher's and a drafter's law, and how positions are summed.

All take logits ``[..., V]`` and give one number a position ``[...]``, float32; p is the
teacher's law, q the drafter's. Rejection sampling accepts a draft with probability
``sum min(p, q) = 1 - TV``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jspec.types import Array

Divergence = Callable[[Array, Array], Array]


class Judged(NamedTuple):
    """What a drafter said at some positions, and what it should have said.

    Attributes:
      teacher: ``[B, t, V']`` the target's logits over the drafter's vocabulary.
      total: ``[B, t]`` their logsumexp over the target's whole vocabulary.
      student: ``[B, t, V']`` the drafter's logits.
      mask: ``[B, t]`` which positions count.
      count: number of all positions, those that were cut off included.
    """

    teacher: Array
    total: Array
    student: Array
    mask: Array
    count: int


Objective = Callable[[Judged], Array]


def _logs(teacher: Array, student: Array) -> tuple[Array, Array]:
    teacher, student = teacher.astype(jnp.float32), student.astype(jnp.float32)
    return jax.nn.log_softmax(teacher, -1), jax.nn.log_softmax(student, -1)


def cross_entropy(teacher: Array, student: Array) -> Array:
    """``-sum p log q``: forward KL but for the teacher's entropy, which has no gradient."""
    log_q = jax.nn.log_softmax(student.astype(jnp.float32), -1)
    return -jnp.sum(jax.nn.softmax(teacher.astype(jnp.float32), -1) * log_q, -1)


def forward_kl(teacher: Array, student: Array) -> Array:
    """``KL(p | q)``; covers all of p. DistillSpec, Zhou et al. 2310.08461."""
    log_p, log_q = _logs(teacher, student)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1)


def reverse_kl(teacher: Array, student: Array) -> Array:
    """``KL(q | p)``; stays where p has mass. DistillSpec."""
    log_p, log_q = _logs(teacher, student)
    return jnp.sum(jnp.exp(log_q) * (log_q - log_p), -1)


def jensen_shannon(teacher: Array, student: Array) -> Array:
    """``KL(p | m) / 2 + KL(q | m) / 2`` with ``m = (p + q) / 2``. DistillSpec."""
    log_p, log_q = _logs(teacher, student)
    log_m = jnp.logaddexp(log_p, log_q) - jnp.log(2.0)
    one = jnp.sum(jnp.exp(log_p) * (log_p - log_m), -1)
    other = jnp.sum(jnp.exp(log_q) * (log_q - log_m), -1)
    return (one + other) / 2


def overlap(teacher: Array, student: Array) -> Array:
    """``sum min(p, q)``, the probability that a draft is accepted."""
    log_p, log_q = _logs(teacher, student)
    return jnp.sum(jnp.exp(jnp.minimum(log_p, log_q)), -1)


def total_variation(teacher: Array, student: Array) -> Array:
    """``1 - sum min(p, q)``: what is rejected. DistillSpec."""
    return 1 - overlap(teacher, student)


def smooth_l1(prediction: Array, truth: Array) -> Array:
    """Huber loss with threshold 1, averaged over the last axis."""
    gap = jnp.abs(prediction - truth)
    return jnp.mean(jnp.where(gap < 1, 0.5 * gap * gap, gap - 0.5), -1)


def over_masked(loss: Array, mask: Array) -> Array:
    """Mean over the positions of the mask; 0 without any."""
    weight = mask.astype(jnp.float32)
    return jnp.sum(loss * weight) / (jnp.sum(weight) + 1e-5)


def acceptance(judged: Judged) -> Array:
    """``[B, t]`` probability that a sampled draft is accepted, ``sum min(p, q)``.

    p is the target's whole law: what it has outside the drafter's vocabulary is lost.
    """
    log_p = judged.teacher - judged.total[..., None]
    log_q = jax.nn.log_softmax(judged.student, -1)
    return jnp.sum(jnp.exp(jnp.minimum(log_p, log_q)), -1)


def over_counted(divergence: Divergence) -> Objective:
    """Mean over the positions that count, as the speculators library takes it."""

    def objective(judged: Judged) -> Array:
        loss = divergence(judged.teacher, judged.student)
        return over_masked(loss, judged.mask)

    return objective


def over_all(divergence: Divergence) -> Objective:
    """Sum over the positions that count, divided by all, as EAGLE-3 and SpecForge do."""

    def objective(judged: Judged) -> Array:
        loss = divergence(judged.teacher, judged.student)
        return jnp.sum(loss * judged.mask) / judged.count

    return objective


def lk_alpha(judged: Judged) -> Array:
    """``-log`` of the acceptance, floored at 1e-5. LK losses, "alpha"."""
    accepted = jnp.maximum(acceptance(judged), 1e-5)
    return over_masked(-jnp.log(accepted), judged.mask)


def lk_lambda(scale: float = 1.0, decay: float = 1.0) -> Objective:
    """``w CE + (1 - w) (1 - acceptance)`` with ``w = scale exp(-decay acceptance)``.

    Starts as cross-entropy, whose gradient reaches far, and becomes the rejection rate;
    w has no gradient. LK losses, "lambda".
    """

    def objective(judged: Judged) -> Array:
        accepted = over_masked(acceptance(judged), judged.mask)
        w = lax.stop_gradient(scale * jnp.exp(-decay * accepted))
        return w * over_all(cross_entropy)(judged) + (1 - w) * (1 - accepted)

    return objective
