"""EAGLE-1, -2 and -3: a decoder layer that continues the target's own features.

EAGLE-1 (Li et al. 2401.15077) feeds ``fc [embed(x_{t+1}); f_t]``, the target's last hidden
state, to an ordinary layer and reads the result with the target's head. EAGLE-2
(2406.16858) is the same network with a tree chosen at run time (``growth.dynamic``).
EAGLE-3 (2503.01840) fuses features of several depths and lets the attention read
``[embed; g]``; it has its own norm and head, often over a reduced vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import struct

from jspec.drafters import layers
from jspec.drafters.growth import Grower
from jspec.drafters.layers import Attention
from jspec.drafters.recurrent import Net, recurrent
from jspec.models.config import Config
from jspec.models.linear import linear, looked_up
from jspec.models.transformer import Layer, mlp, rms_norm
from jspec.types import Array, Drafter


@struct.dataclass
class Weights:
    """A head's weights; what a design does not have is None. M is the head's width.

    Attributes:
      embed: ``[V, E]``, as a rule the target's own.
      layers: decoder layers; the first is fed as the design says.
      head: ``[V', M]``.
      fc: EAGLE-1 ``[M, E + M]``; EAGLE-3 ``[M, F]``.  fc_bias: ``[M]``.
      feature_norm: ``[F]``, or ``[taps, F / taps]`` for one norm a tap.
      embed_norm, hidden_norm: EAGLE-3, on the two halves of the attention's input.
      final_norm: ``[M]`` before the head.
      to_target: ``[V']`` int32 target ids of a reduced vocabulary.
      mask_hidden: ``[F]``, P-EAGLE, stands for features that are not known yet.
    """

    embed: Array
    layers: tuple[Layer, ...]
    head: Array
    fc: Any = None
    fc_bias: Any = None
    feature_norm: Any = None
    embed_norm: Any = None
    hidden_norm: Any = None
    final_norm: Any = None
    to_target: Array | None = None
    mask_hidden: Any = None


@dataclasses.dataclass(frozen=True)
class Design:
    """What a head is apart from its weights; static.

    Attributes:
      config: of its layers (sizes, rope, norm).
      taps: the target's features it reads.
      first: how the first layer is entered: ``eagle1`` or ``eagle3``.
      read: what it makes of the tapped features: ``as_is`` or ``fuse``.
      norm_before_residual: EAGLE-3, the residual is the normed feature.
      norm_output: the feature fed back is the normed output.
      mask_id: P-EAGLE, the token that stands for those that are not known yet.
    """

    config: Config
    taps: tuple[int, ...]
    first: Callable
    read: Callable
    norm_before_residual: bool = False
    norm_output: bool = False
    mask_id: int | None = None


def eagle1(design: Design, params: Weights, e: Array, g: Array, attention: Attention):
    """Residual and attention of EAGLE-1's first layer, which has no input norm."""
    del design
    z = linear(jnp.concatenate([e, g], -1), params.fc, params.fc_bias)
    return z, attention(0, z)


def eagle3(design: Design, params: Weights, e: Array, g: Array, attention: Attention):
    """Residual and attention of EAGLE-3's first layer, which reads ``[e; g]``."""
    normed = rms_norm(g, params.hidden_norm, design.config)
    e = rms_norm(e, params.embed_norm, design.config)
    a = attention(0, jnp.concatenate([e, normed], -1))
    return (normed if design.norm_before_residual else g), a


def as_is(design: Design, params: Weights, features: Array) -> Array:
    """The target's last hidden state is fed as it is."""
    del design, params
    return features


def fuse(design: Design, params: Weights, features: Array) -> Array:
    """EAGLE-3: features ``[..., F]`` of several depths to one of the head's width."""
    norm = params.feature_norm
    if norm is not None:
        parts = features.reshape(*features.shape[:-1], *norm.shape)
        parts = rms_norm(parts, norm, design.config)
        features = parts.reshape(features.shape)
    return linear(features, params.fc, params.fc_bias)


def body(design: Design, params: Weights, e: Array, g: Array, attention: Attention):
    """The layers: embeddings ``e [B, n, E]`` and features ``g [B, n, M]`` to ``[B, n, M]``.

    ``attention`` is given, for decoding and training see different keys.
    """
    config = design.config
    for i, layer in enumerate(params.layers):
        if i == 0:
            x, a = design.first(design, params, e, g, attention)
        else:
            a = attention(i, rms_norm(x, layer.attn_norm, config))
        x = x + a
        x = x + mlp(config, layer, rms_norm(x, layer.mlp_norm, config))
    return x


def feed(design: Design, params: Weights, out: Array) -> Array:
    """The head's output ``[..., M]`` as it is fed back."""
    if not design.norm_output:
        return out
    return rms_norm(out, params.final_norm, design.config)


def logits(design: Design, params: Weights, out: Array) -> Array:
    """``[..., M] -> [..., V']`` float32."""
    if params.final_norm is not None:
        out = rms_norm(out, params.final_norm, design.config)
    return linear(out, params.head).astype(jnp.float32)


def step(
    design: Design,
    params: Weights,
    cache,
    token: Array,
    hidden: Array,
    mask: Array,
    depth: Array,
    before,
) -> tuple[Array, Any]:
    """``Net.step``: pairs over the cache, over earlier rows and over one another."""
    position = cache.length[:, None] + depth
    attention, own = layers.attention(
        design.config, params.layers, cache, mask, position, before
    )
    e = looked_up(params.embed, token, hidden.dtype)
    out = body(design, params, e, hidden, attention)
    return out, own()


@functools.cache
def net(design: Design) -> Net:
    """The head as a network that extends paths."""
    return Net(
        taps=design.taps,
        init_cache=functools.partial(layers.init_cache, design.config),
        fuse=functools.partial(design.read, design),
        step=functools.partial(step, design),
        feed=functools.partial(feed, design),
        logits=functools.partial(logits, design),
        to_target=lambda params: params.to_target,
    )


def drafter(design: Design, grower: Grower, dtype=jnp.float32) -> Drafter:
    """An EAGLE drafter; its params are ``Weights``.

    Args:
      design: the head.
      grower: ``growth.dynamic`` for EAGLE-2's tree, ``growth.ranked`` for a static one,
        ``growth.sampled`` or ``growth.chain`` to draft from the head's law.
      dtype: of the head's cache.
    """
    return recurrent(net(design), grower, dtype=dtype)
