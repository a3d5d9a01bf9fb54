"""What prediction modules are trained on: the tokens that follow, one depth after another.

Every row ``t`` of a text is one chain of drafts: at depth ``k`` (0-based) a module reads
``x_{t+k+1}`` and its own output of depth ``k - 1``, the target's hidden state ``h_t`` at
depth 0, and is judged by ``x_{t+k+2}``. At each depth the rows see one another as they are
at that depth, at the positions of their texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jspec.drafters import eagle, layers
from jspec.drafters.eagle import Design, Weights
from jspec.train import objectives
from jspec.train.draft_rows import draft_rows
from jspec.train.packing import Rows
from jspec.types import Array


class Texts(NamedTuple):
    """Texts and what the target made of them.

    Attributes:
      hidden: ``[B, T, M]`` the target's last hidden states.
      token, document, position: ``[B, T]``; document -1 is padding.
      mask: ``[B, T]`` which tokens count as labels.
    """

    hidden: Array
    token: Array
    document: Array
    position: Array
    mask: Array


def texts(rows: Rows) -> Texts:
    """The texts of packed rows with ``hidden``."""
    return Texts(rows.hidden, rows.tokens, rows.document, rows.position, rows.mask)


def fast_mtp(steps: int = 3, beta: float = 0.6) -> tuple[float, ...]:
    """Weights ``beta^k / sum_j beta^j`` of the depths.

    Source: FastMTP; the speculators library has them too.

    Raises:
      ValueError: ``steps < 1`` or ``beta <= 0``.
    """
    if steps < 1 or beta <= 0:
        raise ValueError(f"{steps} steps, beta {beta}; need at least 1 and beta > 0")
    powers = [beta**k for k in range(steps)]
    return tuple(p / sum(powers) for p in powers)


def deepseek(depths: int = 1, scale: float = 0.3) -> tuple[float, ...]:
    """Weights ``scale / depths`` of every depth. DeepSeek-V3 (2412.19437), eq. 25.

    Its ``scale`` is 0.3 for the first ten trillion tokens and 0.1 after that.

    Raises:
      ValueError: ``depths < 1``.
    """
    if depths < 1:
        raise ValueError(f"{depths} depths; need at least 1")
    return (scale / depths,) * depths


def prediction(
    design: Design,
    modules: tuple[Weights, ...],
    given: Texts,
    weights: tuple[float, ...],
) -> tuple[Array, dict[str, Array]]:
    """``sum_k weights_k CE_k``, the cross-entropy of the data's tokens at every depth.

    ``CE_k`` is the mean over the labels that count and that belong to the document of
    their row. Rows at the end of a text that lack a label at some depth count at none, nor
    do labels outside a module's draft vocabulary.

    Args:
      design: of every module.
      modules: depth ``k`` is module ``k mod D``'s; a single one is used at all of them.
      given: texts of T tokens, ``T > len(weights) + 1``.
      weights: one per depth, see ``fast_mtp`` and ``deepseek``.

    Returns:
      The loss, and per depth ``loss_k``, unweighted, and ``accuracy_k``, the share of
      labels that are the module's best guess.
    """
    total, metrics = jnp.float32(0), {}
    for k, out in enumerate(unroll(design, modules, given, len(weights))):
        size = out.shape[1]
        logits = eagle.logits(design, modules[k % len(modules)], out)
        label = given.token[:, k + 2 :][:, :size]
        same = given.document[:, k + 2 :][:, :size] == given.document[:, :size]
        mask = given.mask[:, k + 2 :][:, :size] & same & (given.document[:, :size] >= 0)
        ids = modules[k % len(modules)].to_target
        label, known = draft_rows(label, ids, logits.shape[-1])
        mask &= known
        loss = objectives.over_masked(_surprise(logits, label), mask)
        hit = jnp.argmax(logits, -1) == label
        total += weights[k] * loss
        metrics |= {f"loss_{k}": loss}
        metrics |= {f"accuracy_{k}": objectives.over_masked(hit, mask)}
    return total, metrics


def _surprise(logits: Array, label: Array) -> Array:
    """``-log q(label)`` for ``logits [..., V]``."""
    log_q = jax.nn.log_softmax(logits, -1)
    return -jnp.take_along_axis(log_q, label[..., None], -1)[..., 0]


def unroll(
    design: Design, modules: tuple[Weights, ...], given: Texts, steps: int
) -> Iterator[Array]:
    """The outputs ``[B, T - steps - 1, M]`` of every depth; gradients flow through all.

    Raises:
      ValueError: texts too short to have a row.
    """
    batch, length = given.token.shape
    size = length - steps - 1
    if size < 1:
        raise ValueError(
            f"{steps} steps need texts of at least {steps + 2} tokens, got {length}"
        )
    document, position = given.document[:, :size], given.position[:, :size]
    causal = jnp.tril(jnp.ones((size, size), bool))
    mask = causal & (document[:, :, None] == document[:, None, :])
    hidden = given.hidden[:, :size]
    cache = layers.init_cache(design.config, batch, 1, hidden.dtype)
    for k in range(steps):
        weights = modules[k % len(modules)]
        token = given.token[:, k + 1 :][:, :size]
        out, _ = eagle.step(design, weights, cache, token, hidden, mask, position, None)
        yield out
        hidden = eagle.feed(design, weights, out)
