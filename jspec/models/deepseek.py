"""DeepSeek-V2 and -V3: multi-head latent attention over a compressed cache, experts.

A token is cached as one vector: the normed key/value latent followed by the rotated part
of the key, which all heads share. Attention runs on these vectors themselves. With ``W_k``
and ``W_v`` the halves of ``kv_b`` that make a head's key and value from a latent ``c``,

    q . (W_k c) = (W_k^T q) . c        sum_s a_s (W_v c_s) = W_v (sum_s a_s c_s)

so queries are taken into latent space, outputs out of it, and every head attends to the
same single key, which is the value too: the *absorbed* form of DeepSeek-V2 (arXiv
2405.04434, section 2.1.2). Keys and values of heads are never built, not even in prefill.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import struct

from jspec import cache as kv_cache
from jspec import tree
from jspec.cache import LatentCache
from jspec.models import moe, rope
from jspec.models import packed as packing
from jspec.models.config import Config, Latent
from jspec.models.latent import latent_attention
from jspec.models.linear import linear, looked_up
from jspec.models.mlp import Mlp
from jspec.models.packed import Packed
from jspec.models.transformer import Weights, mlp, readout, rms_norm
from jspec.types import Array, Block, Scores, Target

# transformers leaves the norms of latents at the default of its class, whatever the
# config says.
_LATENT_EPS = 1e-6


@struct.dataclass
class Layer:
    """Weights of one layer; products are stored ``[out, in]``.

    Q is the query latent's size (M without one), R the key/value latent's, and heads have
    a plain part Dp, a rotated part Dr and values of size Dv.

    Attributes:
      q_a: ``[Q, M]`` or None.  q_a_norm: ``[Q]`` or None.
      q_b: ``[H, Dp + Dr, Q]``.
      kv_a: ``[R + Dr, M]``.  kv_a_norm: ``[R]``.
      kv_b: ``[H, Dp + Dv, R]``.
      out: ``[M, H * Dv]``.
      mlp: an ``Mlp``, or a ``Moe`` where the layer has experts.
      attn_norm, mlp_norm: ``[M]`` before attention and MLP.
      q_a_bias ``[Q]``, kv_a_bias ``[R + Dr]``, out_bias ``[M]``: or None.
    """

    q_b: Array
    kv_a: Array
    kv_a_norm: Array
    kv_b: Array
    out: Array
    mlp: Mlp | moe.Moe
    attn_norm: Array
    mlp_norm: Array
    q_a: Array | None = None
    q_a_norm: Array | None = None
    q_a_bias: Array | None = None
    kv_a_bias: Array | None = None
    out_bias: Array | None = None


@functools.cache
def target(config: Config) -> Target:
    """The pure functions of a model; equal configs give the same object."""
    return Target(
        config=config,
        init_cache=functools.partial(_init_cache, config),
        score=functools.partial(score, config),
    )


def _init_cache(
    config: Config, batch: int, slots: int, dtype=jnp.float32
) -> LatentCache:
    dim = latent_sizes(config).rank + latent_sizes(config).rope_dim
    return kv_cache.init_latent(config.layers, batch, dim, slots, dtype)


def latent_sizes(config: Config) -> Latent:
    """The sizes of latent attention.

    Raises:
      ValueError: the config has none.
    """
    if config.latent is None:
        raise ValueError(
            f"a {config.family} config has no latent attention; use "
            "jspec.models.transformer"
        )
    return config.latent


def score(
    config: Config,
    params: Weights,
    cache: LatentCache,
    block: Block,
    *,
    taps: tuple[int, ...] = (),
    rows="all",
    packed: int | None = None,
) -> Scores:
    """One forward over a block; the cache is only read. See ``types.Target``.

    ``Scores.kv`` holds the block's own latents, one ``[B, N, 1, R + Dr]`` array per layer.
    """
    mask, pack = tree.ancestors(block.parent), packing.pack(block.live, packed)
    position = packing.rows(pack, cache.length[:, None] + tree.depth(mask))
    turn = rope.turns(config.ropes[0], latent_sizes(config).rope_dim, position)

    token = packing.rows(pack, block.token)
    x = looked_up(params.embed, token, params.final_norm.dtype)
    streams, own = {0: x}, []
    for i, layer in enumerate(params.layers):
        cached = cache.latent[i], cache.length
        x, c = decoder_layer(layer, x, cached, mask, turn, pack, config=config)
        own.append(c)
        streams[i + 1] = x
    return readout(config, params, streams, tuple(own), taps, rows, pack)


# Jitted, so that all layers of one kind are traced and lowered once; XLA inlines them.
@functools.partial(jax.jit, static_argnames="config")
def decoder_layer(
    layer: Layer,
    x,
    cached,
    mask,
    turn,
    pack: Packed | None = None,
    *,
    config: Config,
):
    """One layer: ``x [B, N, M]`` -> the same shape, and the block's own latents.

    See ``attend`` for the other arguments.
    """
    h = rms_norm(x, layer.attn_norm, config)
    a, c = attend(layer, h, cached, mask, turn, config=config, pack=pack)
    x = x + a
    return x + mlp(config, layer, rms_norm(x, layer.mlp_norm, config)), c


def attend(
    layer: Layer,
    h,
    cached,
    mask,
    turn,
    *,
    config: Config,
    before: Array | None = None,
    pack: Packed | None = None,
) -> tuple[Array, Array]:
    """Latent attention of a block and its output product.

    Args:
      layer: its weights.  h: ``[B, N, M]`` normalised input.
      cached: latents ``[B, 1, S, R + Dr]`` and ``length [B]``.
      mask: as in ``latent_attention``.  turn: from ``rope.turns``.
      config: static.
      before: latents ``[B, R, 1, R + Dr]`` of block rows scored earlier, which are the
        first columns of ``mask [B, N, R + N]``.
      pack: where the nodes are, if ``h`` is ``[1, R, M]``; ``a`` is like it then.

    Returns:
      ``(a [B, N, M], c [B, N, 1, R + Dr])`` with the block's own latents.
    """
    sizes, (stored, length) = latent_sizes(config), cached
    key_up, value_up = (
        layer.kv_b[:, : sizes.plain_dim],
        layer.kv_b[:, sizes.plain_dim :],
    )
    q = _queries(config, layer, h)
    plain, turned = q[..., : sizes.plain_dim], q[..., sizes.plain_dim :]
    absorbed = jnp.einsum("bnhd,hdr->bnhr", plain, key_up)
    q = jnp.concatenate([absorbed, _rotate(turned, turn, sizes)], -1)
    c = _own_latents(config, layer, h, turn).astype(stored.dtype)
    q, c = packing.blocks(pack, q), packing.blocks(pack, c)
    rows = c if before is None else jnp.concatenate([before, c], 1)
    scale = config.query_scale
    mixed = latent_attention(q, stored, length, rows, mask, scale=scale).astype(h.dtype)
    mixed = packing.rows(pack, mixed)
    # The rotated part was mixed too: leaving it out would have copied the cache.
    values = jnp.einsum("bnhr,hvr->bnhv", mixed[..., : sizes.rank], value_up)
    a = linear(values.reshape(*h.shape[:2], -1), layer.out, layer.out_bias)
    return a, c


def _queries(config: Config, layer: Layer, h: Array) -> Array:
    """Queries ``[B, N, H, Dp + Dr]`` before rotation."""
    if layer.q_a is not None:
        h = linear(h, layer.q_a, layer.q_a_bias)
        h = _latent_norm(h, layer.q_a_norm, config)
    heads, dim, _ = layer.q_b.shape
    q = linear(h, layer.q_b)
    return q.reshape(*h.shape[:2], heads, dim)


def _own_latents(config: Config, layer: Layer, h: Array, turn: rope.Turns) -> Array:
    """``[B, N, 1, R + Dr]``: what the cache stores of the block's tokens."""
    sizes = latent_sizes(config)
    both = linear(h, layer.kv_a, layer.kv_a_bias)[:, :, None]
    c = _latent_norm(both[..., : sizes.rank], layer.kv_a_norm, config)
    return jnp.concatenate([c, _rotate(both[..., sizes.rank :], turn, sizes)], -1)


def _latent_norm(x: Array, weight: Any, config: Config) -> Array:
    return rms_norm(x, weight, dataclasses.replace(config, norm_eps=_LATENT_EPS))


def _rotate(x: Array, turn: rope.Turns, sizes: Latent) -> Array:
    """Rotates ``x [B, N, heads, Dr]``; neighbouring pairs leave as distant ones.

    Queries and keys are reordered alike, so that their products do not change.
    """
    if sizes.interleave:
        x = rearrange(x, "b n h (d two) -> b n h (two d)", two=2)
    return rope.rotate(x, turn)


def init(config: Config, key: Array, dtype=jnp.float32, scale: float = 0.02) -> Weights:
    """Random weights (normal, ``scale``; norms at 1)."""
    sizes, hidden, heads = latent_sizes(config), config.hidden, config.heads
    rotated = sizes.rank + sizes.rope_dim

    def normal(key, *shape):
        return scale * jax.random.normal(key, shape, dtype)

    def norm(size):
        return jnp.ones(size, dtype)

    def layer(key, i):
        k_attn, k_bias, k_mlp = jax.random.split(key, 3)
        k_q_a, k_q_b, k_kv_a, k_kv_b, k_out = jax.random.split(k_attn, 5)
        k_q_bias, k_kv_bias, k_out_bias = jax.random.split(k_bias, 3)
        low, bias = sizes.query_rank, config.qkv_bias
        return Layer(
            q_a=normal(k_q_a, low, hidden) if low else None,
            q_a_norm=norm(low) if low else None,
            q_a_bias=normal(k_q_bias, low) if low and bias else None,
            q_b=normal(k_q_b, heads, config.head_dim, low or hidden),
            kv_a=normal(k_kv_a, rotated, hidden),
            kv_a_norm=norm(sizes.rank),
            kv_a_bias=normal(k_kv_bias, rotated) if bias else None,
            kv_b=normal(k_kv_b, heads, sizes.plain_dim + sizes.value_dim, sizes.rank),
            out=normal(k_out, hidden, heads * sizes.value_dim),
            out_bias=normal(k_out_bias, hidden) if config.out_bias else None,
            mlp=moe.init(config, i, jax.random.split(k_mlp, 4), normal),
            attn_norm=norm(hidden),
            mlp_norm=norm(hidden),
        )

    k_embed, k_head, *k_layers = jax.random.split(key, config.layers + 2)
    tied = config.tie_embeddings
    return Weights(
        embed=normal(k_embed, config.vocab_size, hidden),
        layers=tuple(layer(k, i) for i, k in enumerate(k_layers)),
        final_norm=norm(hidden),
        head=None if tied else normal(k_head, config.vocab_size, hidden),
    )
