"""Mixtures of experts: the router, and the chosen experts' sum in two forms.

With few rows, ``each``: a loop over the experts that a row chose. Their weights alone are
read, once each, and all rows pass through them, since a row that did not choose an
expert has weight 0 there. With many rows nearly every expert is chosen by some row, and
``all_at_once`` is two large products over all of them: it reads the same weights without
a loop. On two CPU cores with 4 of 32 experts a token (512 x 256, float32) the first takes
0.9 ms for one row where the second takes 2.1, both 2.6 for four rows, and for eight rows
4.5 where the second takes 3.3: half of the experts is where they meet. XLA's own
``ragged_dot`` took 45 ms for one row, and gathering the experts of 8 rows 21 ms.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec.models.config import Config, Experts
from jspec.models.linear import linear
from jspec.models.mlp import ACTIVATIONS, Mlp, gated
from jspec.types import Array


@struct.dataclass
class Moe:
    """Weights of a layer's experts; E of them.

    Attributes:
      router: ``[E, M]`` float32.
      gate_up: ``[E, 2, I, M]``.  down: ``[E, M, I]``.
      correction: ``[E]`` float32 added to the scores when experts are chosen, or None.
      shared: an MLP that every token passes, or None.
      shared_gate: ``[1, M]``, its output is multiplied by the sigmoid of this product.
    """

    router: Array
    gate_up: Array
    down: Array
    correction: Array | None = None
    shared: Mlp | None = None
    shared_gate: Array | None = None


def mixture(config: Config, weights: Moe, h: Array) -> Array:
    """The MLP of a layer with experts on normalised ``h [B, N, M]``.

    Raises:
      ValueError: the config has no experts.
    """
    experts = config.experts
    if experts is None:
        raise ValueError(
            f"weights have experts, but the {config.family} config has none"
        )
    x = h.reshape(-1, h.shape[-1])
    chosen, share = route(experts, weights, x)
    rows = jnp.arange(x.shape[0])
    share = jnp.zeros((experts.count, x.shape[0])).at[chosen.T, rows].set(share.T)
    if 2 * chosen.size <= experts.count:
        y = each(config.activation, weights, share, x, most=chosen.size)
    else:
        y = all_at_once(config.activation, weights, share, x)
    y = y.reshape(h.shape)
    if weights.shared is None:
        return y
    shared = gated(config.activation, weights.shared, h)
    if weights.shared_gate is not None:
        shared = shared * jax.nn.sigmoid(linear(h, weights.shared_gate))
    return y + shared


def route(experts: Experts, weights: Moe, x: Array) -> tuple[Array, Array]:
    """The experts of every row of ``x [R, M]`` and their weights, in float32.

    Sources: Qwen3's softmax router; DeepSeek-V2 (arXiv 2405.04434), section 2.2, choice
    limited to the best groups; DeepSeek-V3 (arXiv 2412.19437), eq. 16, choice by
    corrected scores, and transformers' router classes of these models.

    Returns:
      ``(chosen [R, C] int32, share [R, C])``, C = ``experts.per_token``.
    """
    logits = jnp.einsum(
        "rm,em->re",
        x.astype(jnp.float32),
        weights.router.astype(jnp.float32),
        precision=lax.Precision.HIGHEST,
    )
    score = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}[experts.score](
        logits
    )
    rank = score
    if weights.correction is not None:
        rank = score + weights.correction
    _, chosen = lax.top_k(_within_groups(experts, rank), experts.per_token)
    share = jnp.take_along_axis(score, chosen, axis=1)
    if experts.normalise:
        share = share / (jnp.sum(share, -1, keepdims=True) + 1e-20)
    return chosen, share * experts.scale


def _within_groups(experts: Experts, rank: Array) -> Array:
    """``rank [R, E]`` with -inf outside each row's best groups."""
    if experts.groups == experts.groups_kept:
        return rank
    grouped = rank.reshape(rank.shape[0], experts.groups, -1)
    best, _ = lax.top_k(grouped, 2 if experts.corrected else 1)
    _, kept = lax.top_k(jnp.sum(best, -1), experts.groups_kept)
    is_kept = jnp.any(kept[..., None] == jnp.arange(experts.groups), 1)
    return jnp.where(is_kept[..., None], grouped, -jnp.inf).reshape(rank.shape)


def each(activation: str, weights: Moe, share: Array, x: Array, *, most: int) -> Array:
    """The chosen experts' sum ``[R, M]``, expert by expert.

    Args:
      activation: name.  share: ``[E, R]`` float32, 0 where a row did not choose an expert.
      x: ``[R, M]``.  most: static bound on the experts that are chosen by some row.
    """
    used = jnp.any(share != 0, 1)  # not `> 0`: a NaN must come through
    order = jnp.argsort(~used)[:most]

    def add(y, e):
        both = linear(x, weights.gate_up[e])
        gate, up = jnp.split(both, 2, -1)
        h = _weighed(ACTIVATIONS[activation](gate) * up, share[e][:, None])
        return y + linear(h, weights.down[e])

    def step(y, e):
        return lax.cond(used[e], add, lambda y, e: y, y, e), None

    return lax.scan(step, jnp.zeros_like(x), order)[0]


def all_at_once(activation: str, weights: Moe, share: Array, x: Array) -> Array:
    """As ``each``, all experts in one product."""
    count, _, wide, hidden = weights.gate_up.shape
    both = lax.dot_general(
        weights.gate_up.reshape(-1, hidden), x, (((1,), (1,)), ((), ()))
    ).reshape(count, 2, wide, -1)
    h = _weighed(ACTIVATIONS[activation](both[:, 0]) * both[:, 1], share[:, None])
    return jnp.einsum("emi,eir->emr", weights.down, h).sum(0).T


def _weighed(h: Array, share: Array) -> Array:
    """``h * share``, and 0 where the share is, even if ``h`` overflowed there."""
    return jnp.where(share == 0, 0, h * share.astype(h.dtype))


def init(config: Config, layer: int, keys, normal: Callable) -> Mlp | Moe:
    """Random MLP of a layer, ordinary or of experts; the correction is random too.

    Args:
      layer: its 0-based id.  keys: four.  normal: ``(key, *shape) -> array``.
    """
    experts, hidden, wide = config.experts, config.hidden, config.intermediate
    k_in, k_out, k_in_bias, k_out_bias = keys
    if experts is None or not config.has_experts(layer):
        bias = config.mlp_bias
        return Mlp(
            gate_up=normal(k_in, 2, wide, hidden),
            down=normal(k_out, hidden, wide),
            gate_up_bias=normal(k_in_bias, 2, wide) if bias else None,
            down_bias=normal(k_out_bias, hidden) if bias else None,
        )
    count, wide, shared, gate = experts.count, experts.intermediate, None, None
    k_in, k_in_shared, k_router = jax.random.split(k_in, 3)
    k_out, k_out_shared, k_correction = jax.random.split(k_out, 3)
    if experts.shared:
        shared = Mlp(
            gate_up=normal(k_in_shared, 2, experts.shared * wide, hidden),
            down=normal(k_out_shared, hidden, experts.shared * wide),
        )
    if experts.shared_gate:
        k_router, k_gate = jax.random.split(k_router)
        gate = normal(k_gate, 1, hidden)
    correction = normal(k_correction, count).astype(jnp.float32)
    return Moe(
        router=normal(k_router, count, hidden).astype(jnp.float32),
        gate_up=normal(k_in, count, 2, wide, hidden),
        down=normal(k_out, count, hidden, wide),
        correction=correction if experts.corrected else None,
        shared=shared,
        shared_gate=gate,
    )
