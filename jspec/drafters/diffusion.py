"""The network of block-diffusion drafters: DFlash, DFlash-2, DSpark.

A few layers see ``[x_n, mask, mask, ..]``, all rows one another, and know the text only
through keys and values made of the target's own features, which are fused once and given
to every layer. Source: Chen et al. 2602.06036, section 3.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax.numpy as jnp
from flax import struct

from jspec.cache import KV, KVCache
from jspec.drafters.block_conv import Convs, around
from jspec.drafters.block_reach import by_row, decoding
from jspec.models import rope
from jspec.models.config import Config, Rope
from jspec.models.linear import linear, looked_up
from jspec.models.transformer import Layer, mlp, output, project, rms_norm
from jspec.types import Array

# (i, queries, keys, values of the block's rows) -> what the heads of layer i read
Attend = Callable[[int, Array, Array, Array], Array]


@struct.dataclass
class Weights:
    """A drafter's weights. M is its width, R the rows of its block.

    Attributes:
      embed: ``[V, M]``, the target's own.
      layers: decoder layers.
      head: ``[V', M]``, as a rule the target's.
      fc: ``[M, F]``, fuses the tapped features.
      context_norm, final_norm: ``[M]``, after ``fc`` and before the head.
      to_target: ``[V']`` int32 target ids of a reduced vocabulary.
      joint: what joins the guesses of a block: a ``block_selector.Selector`` or a
        ``dspark.Markov``; None where they are independent.
      confidence: a ``dspark.Confidence``, or None.
      convs: DFlash-2, one pair a layer; empty without.
    """

    embed: Array
    layers: tuple[Layer, ...]
    head: Array
    fc: Any
    context_norm: Any
    final_norm: Any
    to_target: Array | None = None
    joint: Any = None
    confidence: Any = None
    convs: tuple[Convs, ...] = ()


class Drafts(NamedTuple):
    """The guesses of a block, in draft ids.

    Attributes:
      token: ``[B, G]`` int32.
      law: ``[B, G, V']``, what each was drawn from given those before it.
      confidence: ``[B, G]`` chance that each is accepted if those before it are, found
        without looking at the token itself; None if nobody can tell.
    """

    token: Array
    law: Array
    confidence: Array | None = None


@dataclasses.dataclass(frozen=True)
class Design:
    """What a drafter is apart from its weights; static.

    Attributes:
      config: of its layers (sizes, rope, windows, norm, cap of the logits).
      taps: the target's features it reads.
      block: rows of the blocks it was trained on, the anchor's included.
      mask_id: the token that stands where nothing is known.
      next_token: row ``i`` guesses the token after its position (DeepSpec), so that all
        rows are guesses; if not, its own position's (z-lab), and row 0 guesses nothing.
      causal: per layer, rows see no later rows.
      choose: how tokens are chosen: ``dflash.independent``,
        ``block_selector.selected``, ``dspark.left_to_right``.
      reach: what a sliding window hides, see ``block_reach``.
      link: how ``choose`` carries the path, see ``dspark``; None if it needs no such.
      embed_scale, output_scale: factors on embeddings and logits.
    """

    config: Config
    taps: tuple[int, ...]
    block: int
    mask_id: int
    next_token: bool
    causal: tuple[bool, ...]
    choose: Callable
    reach: Callable = by_row
    link: Callable | None = None
    embed_scale: float = 1.0
    output_scale: float = 1.0

    @property
    def most(self) -> int:
        """Drafts of a whole block."""
        return self.block if self.next_token else self.block - 1


def context_kv(design: Design, params: Weights, features: Array, position: Array) -> KV:
    """Keys and values ``[B, T, K, D]`` of every layer, made of ``features [B, T, F]``.

    Fused once for all layers, which add their own projections. A token's depend on its
    own feature and position alone, so in whatever parts they are made they are the same.
    """
    config = design.config
    h = rms_norm(linear(features, params.fc), params.context_norm, config)
    turns = _turns(config, position)
    ks, vs = [], []
    for r, layer in zip(config.ropes, params.layers, strict=True):
        bias = layer.qkv_bias
        kv = linear(
            h, cast(Array, layer.qkv)[:, -2:], None if bias is None else bias[:, -2:]
        )
        kv = kv.reshape(*h.shape[:2], config.kv_heads, 2, config.head_dim)
        k, v = kv[..., 0, :], kv[..., 1, :]
        if layer.k_norm is not None:
            k = rms_norm(k, layer.k_norm, config)
        ks.append(rope.rotate(k, turns[r]))
        vs.append(v)
    return KV(tuple(ks), tuple(vs))


def _turns(config: Config, position: Array) -> dict[Rope, rope.Turns]:
    """What rotates queries and keys at ``position``, by layers' ropes."""
    return {r: rope.turns(r, config.head_dim, position) for r in set(config.ropes)}


def body(
    design: Design, params: Weights, x: Array, position: Array, attend: Attend
) -> Array:
    """The layers over blocks: ``x [B, n, M]`` at ``position [B, n]`` to normed rows.

    ``attend`` is given, for decoding and training see the context in different places.
    """
    config, turns = design.config, _turns(design.config, position)
    for i, layer in enumerate(params.layers):
        turn = turns[config.ropes[i]]

        def attention(h: Array, i: int = i, layer=layer, turn=turn) -> Array:
            q, k, v, gate = project(config, layer, h)
            a = attend(i, rope.rotate(q, turn), rope.rotate(k, turn), v)
            return output(layer, a.astype(h.dtype), gate)

        conv = params.convs[i] if params.convs else None
        h = rms_norm(x, layer.attn_norm, config)
        x = x + around(conv and conv.attention, h, attention)
        h = rms_norm(x, layer.mlp_norm, config)
        x = x + around(conv and conv.mlp, h, functools.partial(mlp, config, layer))
    return rms_norm(x, params.final_norm, config)


def embedded(design: Design, params: Weights, token: Array) -> Array:
    """``[...] -> [..., M]``, the rows that enter the layers."""
    x = looked_up(params.embed, token, params.final_norm.dtype)
    return (
        x if design.embed_scale == 1 else x * jnp.asarray(design.embed_scale, x.dtype)
    )


def logits(design: Design, params: Weights, hidden: Array) -> Array:
    """Normed rows ``[..., M]`` to ``[..., V']`` float32."""
    z = linear(hidden, params.head).astype(jnp.float32) * design.output_scale
    cap = design.config.final_softcap
    return z if cap is None else cap * jnp.tanh(z / cap)


def forward(design: Design, params: Weights, cache: KVCache, anchor: Array, rows: int):
    """Normed hidden rows ``[B, rows, M]`` of the block that begins with ``anchor [B]``."""
    masks = jnp.full((anchor.shape[0], rows - 1), design.mask_id)
    token = jnp.concatenate([anchor[:, None], masks], 1)
    position = cache.length[:, None] + jnp.arange(rows)
    x = embedded(design, params, token)
    return body(design, params, x, position, decoding(design, cache, rows))
