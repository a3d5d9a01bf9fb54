"""Losses of block-diffusion drafters, with the weights and denominators of their codes."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jspec.drafters.diffusion import Design
from jspec.train.dflash import Aim, Rated
from jspec.types import Array

# (loss, weight, mask) -> mean; all [B, N, R]
Mean = Callable[[Array, Array, Array], Array]


def over_weights(loss: Array, weight: Array, mask: Array) -> Array:
    """``sum w l / (sum w + 1e-6)``: DeepSpec and SpecForge."""
    del mask
    return jnp.sum(weight * loss) / (jnp.sum(weight) + 1e-6)


def over_rows(loss: Array, weight: Array, mask: Array) -> Array:
    """``sum w l / (sum mask + 1e-5)``: the speculators library."""
    return jnp.sum(weight * loss) / (jnp.sum(mask) + 1e-5)


def decay(design: Design, gamma: float) -> Array:
    """``[R]``: ``exp(-j / gamma)`` of the block's guess ``j``, from 0.

    Early guesses count more, for later ones are only reached through them. Source: Chen
    et al. 2602.06036, eq. 4; ``gamma`` is 7 for blocks of 16 rows and 4 for 7 or 8.
    """
    step = jnp.arange(design.block) - (0 if design.next_token else 1)
    return jnp.exp(-jnp.maximum(step, 0) / gamma)


def dpace(rated: Rated, valid: Array, alpha: float = 0.5) -> Array:
    """D-PACE weights ``sum_{j >= k} prod_{i <= j} s_i``, ``s = (1 - alpha) q(y) + alpha``.

    The expected number of guesses that row ``k`` can still help to be accepted, by what
    the drafter holds of the labels now; without a gradient. Rows that are not ``valid``
    stand aside.
    """
    s = (1 - alpha) * jnp.exp(-lax.stop_gradient(rated.surprise)) + alpha
    prefix = jnp.cumprod(jnp.where(valid, s, 1.0), -1) * valid
    return jnp.flip(jnp.cumsum(jnp.flip(prefix, -1), -1), -1) * valid


def unbroken(valid: Array) -> Array:
    """Rows before the first that is not valid: DSpark ends a block there."""
    return jnp.cumprod(valid, -1).astype(bool)


def cross_entropy(
    rated: Rated, weight: Array, mask: Array, mean: Mean = over_weights
) -> Array:
    """DFlash's loss: the weighted mean of ``-log q(label)``."""
    return mean(rated.surprise, weight, mask)


def corrected(
    final: Rated,
    base: Rated,
    weight: Array,
    mask: Array,
    mean: Mean = over_weights,
    *,
    share: float,
) -> Array:
    """Domino's loss: ``(1 - share) CE(final) + share CE(base)``.

    ``base`` is the block before its correction; SpecForge lets its share fall from 1 to 0
    over the first half of training.
    """
    own = cross_entropy(final, weight, mask, mean)
    return (1 - share) * own + share * cross_entropy(base, weight, mask, mean)


def spark(
    rated: Rated,
    weight: Array,
    mask: Array,
    mean: Mean = over_weights,
    *,
    ce: float = 0.1,
    rejection: float = 1.8,
    confidence: float = 1.0,
) -> Array:
    """DSpark's loss: cross-entropy, chance of rejection, and confidence.

    ``0.1 CE + 0.9 sum |p - q| + BCE(c, sum min(p, q))``, and ``sum |p - q|`` is twice the
    chance of rejection ``1 - sum min(p, q)``. The confidence's aim has no gradient.
    Source: DSpark (2607.05147), section 3.4. In the speculators library 0.9 weighs the
    chance itself.
    """
    assert rated.overlap is not None
    loss = ce * mean(rated.surprise, weight, mask)
    loss += rejection * mean(1 - rated.overlap, weight, mask)
    if rated.doubt is not None:
        aim = lax.stop_gradient(rated.overlap)
        bce = optax.sigmoid_binary_cross_entropy(rated.doubt, aim)
        loss += confidence * mean(bce, weight, mask)
    return loss


def seen(design: Design, rated: Rated, aim: Aim) -> dict[str, Array]:
    """What to watch, without gradients.

    ``accuracy`` and ``acceptance``, per guess of a block, over its valid rows, and
    ``accepted``, the mean number of guesses that a greedy round would keep.
    """
    first = 0 if design.next_token else 1
    hit, valid = rated.hit[..., first:], aim.valid[..., first:]
    count = jnp.sum(valid, (0, 1)) + 1e-5
    kept = jnp.sum(jnp.cumprod(hit & valid, -1), -1)
    blocks = valid[..., 0]
    found = {
        "accuracy": jnp.sum(hit & valid, (0, 1)) / count,
        "accepted": jnp.sum(kept * blocks) / (jnp.sum(blocks) + 1e-5),
    }
    if rated.overlap is not None:
        chance = lax.stop_gradient(rated.overlap)[..., first:]
        found["acceptance"] = jnp.sum(chance * valid, (0, 1)) / count
        if rated.doubt is not None:
            sure = jax.nn.sigmoid(lax.stop_gradient(rated.doubt))[..., first:]
            gap = jnp.abs(sure - chance) * valid
            found["confidence_error"] = jnp.sum(gap, (0, 1)) / count
    return found
