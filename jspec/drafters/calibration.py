"""Temperatures that make a confidence head's chances true: sequential scaling.

A scheduler multiplies confidences: the chance that the first ``k`` drafts are all accepted
is taken to be the product of ``k`` of them. So temperatures are fitted one position after
the other, each to the product up to there. Source: DSpark (2607.05147), section 4.2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec import sampling as smp
from jspec.decode import decode_round
from jspec.drafters.loading import block_draft
from jspec.drafters.published_dflash import BlockHead
from jspec.models import Model
from jspec.requests import prepare
from jspec.state import RUNNING
from jspec.types import Context

GRID = np.logspace(-1, 1, 41)
BINS = 15


class Rounds(NamedTuple):
    """Confidence logits ``[n, G]`` of the drafts of n rounds, and ``kept [n]`` of them."""

    logit: np.ndarray
    kept: np.ndarray


class Fit(NamedTuple):
    """Temperatures ``[G]``, and the products' calibration error before and after, ``[G]``."""

    temperature: np.ndarray
    before: np.ndarray
    after: np.ndarray


def record(
    model: Model,
    head: BlockHead,
    prompts: Sequence[Any],
    *,
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    seed: int = 0,
) -> Rounds:
    """Decodes prompts and notes what was held of every draft, and how many were kept.

    Rounds that end a text are left out: what was cut there was not refused.

    Raises:
      ValueError: the drafter has no confidence head.
    """
    confidence = head.weights.confidence
    if confidence is None:
        raise ValueError("the drafter has no confidence head, so none to calibrate")
    bare = dataclasses.replace(confidence, temperature=None)
    weights = dataclasses.replace(head.weights, confidence=bare)
    draft = block_draft(dataclasses.replace(head, weights=weights), "bare", model)
    drafter, most = draft.drafter, draft.drafter.shape.depth
    request = prepare(
        model,
        draft,
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
    )

    @jax.jit
    def step(params, state):
        context = Context(state.tokens, state.length, state.sampling)
        k_draft, _ = smp.row_keys(state.sampling, state.round)
        # The round below proposes the same block, for its keys are the same.
        _, proposed = drafter.propose(params.draft, state.draft, k_draft, context)
        whole = (state.reason == RUNNING) & (state.limit - state.length > most)
        state, info = decode_round(
            params, state, target=model.target, drafter=drafter, rule=request.rule
        )
        whole &= state.reason == RUNNING
        return state, (proposed.confidence, info.emitted - 1, whole)

    state, found = request.prefill(), []
    while bool(jnp.any(state.reason == RUNNING)):
        state, one = step(request.params, state)
        found.append(jax.device_get(one))
    chance, kept, whole = (np.concatenate(x) for x in zip(*found, strict=True))
    chance = np.clip(chance[whole].astype(np.float64), 1e-12, 1 - 1e-12)
    return Rounds(np.log(chance) - np.log1p(-chance), kept[whole])


def fit(rounds: Rounds) -> Fit:
    """The temperatures that make the products of confidences truest.

    For ``k = 1, 2, ..``, with those before it fixed, the one of 41 between 0.1 and 10 with
    the least expected calibration error of ``prod_{i <= k} sigmoid(l_i / T_i)`` against
    "the first ``k`` were kept".

    Raises:
      ValueError: no rounds.
    """
    logit, kept = rounds
    if not len(kept):
        raise ValueError(
            "no rounds to fit temperatures to; decode more or longer texts"
        )
    product = plain = np.ones(len(kept))
    found = []
    for k in range(logit.shape[1]):
        truth = kept > k
        plain = plain * _sigmoid(logit[:, k])
        tried = [product * _sigmoid(logit[:, k] / t) for t in GRID]
        errors = [calibration_error(p, truth) for p in tried]
        best = int(np.argmin(errors))
        product = tried[best]
        found.append((GRID[best], calibration_error(plain, truth), errors[best]))
    return Fit(*map(np.asarray, zip(*found, strict=True)))


def calibrated(head: BlockHead, fitted: Fit) -> BlockHead:
    """The drafter with these temperatures, which ``save_dflash`` writes beside it."""
    confidence = head.weights.confidence
    assert confidence is not None
    temperature = jnp.asarray(fitted.temperature, jnp.float32)
    confidence = dataclasses.replace(confidence, temperature=temperature)
    weights = dataclasses.replace(head.weights, confidence=confidence)
    return dataclasses.replace(head, weights=weights)


def calibration_error(chance: np.ndarray, truth: np.ndarray) -> float:
    """Expected calibration error of ``chance [n]`` against ``truth [n]``, equal bins."""
    place = np.minimum((chance * BINS).astype(int), BINS - 1)
    count = np.bincount(place, minlength=BINS)
    gap = np.bincount(place, chance - truth, minlength=BINS)
    return float(np.abs(gap).sum() / max(count.sum(), 1))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-np.clip(x, -50, 50)))
