"""One transformer for Llama, SmolLM2, Mistral, Qwen2, Qwen3 (dense and MoE) and Gemma 3.

Weights are nested dataclasses, layers are functions. Projections that read the same
input are stored as one array, grouped so that every kv head's slice is contiguous:
fewer products a step, and a tensor-parallel mesh can still split the kv heads.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec import cache as kv_cache
from jspec import tree
from jspec.cache import KV, KVCache
from jspec.models import moe, rope
from jspec.models import packed as packing
from jspec.models.config import Config
from jspec.models.linear import linear, looked_up
from jspec.models.mlp import Mlp, gated
from jspec.models.packed import Packed
from jspec.pallas import block_attention
from jspec.sampling import mask_padding
from jspec.types import Array, Block, Scores, Target


@struct.dataclass
class Layer:
    """Weights of one layer; products are stored ``[out, in]``. G = H / K.

    Attributes:
      qkv: ``[K, G + 2, D, M]``; per kv head its queries, its key, its value. With gates
        ``[K, 2 G + 2, D, M]``, every query followed by its gate.
      out: ``[M, H * D]``.
      mlp: an ``Mlp``, or a ``Moe`` where the layer has experts.
      attn_norm, mlp_norm: ``[M]`` before attention and MLP.
      attn_post_norm, mlp_post_norm: ``[M]`` after them, or None.
      q_norm, k_norm: ``[D]`` or None.
      qkv_bias ``[K, G + 2, D]``, out_bias ``[M]``: or None.
    """

    qkv: Array
    out: Array
    mlp: Mlp | moe.Moe
    attn_norm: Array
    mlp_norm: Array
    attn_post_norm: Array | None = None
    mlp_post_norm: Array | None = None
    q_norm: Array | None = None
    k_norm: Array | None = None
    qkv_bias: Array | None = None
    out_bias: Array | None = None


@struct.dataclass
class Weights:
    """A model's weights: ``embed [V, M]``, layers, ``final_norm [M]``, ``head [V, M]``.

    ``head`` is None when it is the embedding. The residual stream has the dtype of
    ``final_norm``, which may be wider than that of the products. Layers are ``Layer`` of
    this file or of ``deepseek``.
    """

    embed: Array
    layers: tuple[Any, ...]
    final_norm: Array
    head: Array | None = None


@functools.cache
def target(config: Config) -> Target:
    """The pure functions of a model; equal configs give the same object."""
    return Target(
        config=config,
        init_cache=functools.partial(_init_cache, config),
        score=functools.partial(score, config),
    )


def _init_cache(config: Config, batch: int, slots: int, dtype=jnp.float32) -> KVCache:
    return kv_cache.init(
        config.layers, batch, config.kv_heads, config.head_dim, slots, dtype
    )


def score(
    config: Config,
    params: Weights,
    cache: KVCache,
    block: Block,
    *,
    taps: tuple[int, ...] = (),
    rows="all",
    packed: int | None = None,
) -> Scores:
    """One forward over a block; the cache is only read. See ``types.Target``.

    Node ``i`` stands at position ``cache.length + depth(i)`` and sees the cached prefix
    and its ancestors.
    """
    mask, pack = tree.ancestors(block.parent), packing.pack(block.live, packed)
    position = packing.rows(pack, cache.length[:, None] + tree.depth(mask))
    turns = {r: rope.turns(r, config.head_dim, position) for r in set(config.ropes)}

    token = packing.rows(pack, block.token)
    x = looked_up(params.embed, token, params.final_norm.dtype)
    if config.embed_scale != 1.0:
        x = x * jnp.asarray(config.embed_scale, x.dtype)
    streams, ks, vs = {0: x}, [], []
    for i, layer in enumerate(params.layers):
        x, k, v = decoder_layer(
            layer,
            x,
            (cache.k[i], cache.v[i], cache.length),
            mask,
            turns[config.ropes[i]],
            pack,
            config=config,
            window=config.windows[i],
        )
        ks.append(k)
        vs.append(v)
        streams[i + 1] = x
    kv = KV(tuple(ks), tuple(vs))
    return readout(config, params, streams, kv, taps, rows, pack)


def readout(
    config: Config,
    params: Weights,
    streams: dict[int, Array],
    kv,
    taps,
    rows,
    pack: Packed | None = None,
) -> Scores:
    """The scores of a block from the residual stream after 0, 1 .. L layers."""
    x = rms_norm(streams[config.layers], params.final_norm, config)
    streams = streams | {-1: x}
    features = None
    if taps:
        features = jnp.concatenate([streams[t] for t in taps], -1)
        features = packing.blocks(pack, features)
    if isinstance(rows, str) and rows == "all":
        logits = packing.blocks(pack, _logits(config, params, x))
    else:
        picked = _pick(packing.blocks(pack, x), rows)
        logits = _logits(config, params, picked)
    return Scores(logits, kv, features)


def _pick(x: Array, rows) -> Array:
    """The rows of ``x [B, N, M]`` whose logits are wanted, one a block or none."""
    if isinstance(rows, str):
        return {"none": x[:, :0]}[rows]
    return jnp.take_along_axis(x, rows[:, None, None], axis=1)


def _logits(config: Config, params: Weights, x: Array) -> Array:
    head = params.embed if params.head is None else params.head
    logits = linear(x, head).astype(jnp.float32)
    if config.final_softcap is not None:
        logits = config.final_softcap * jnp.tanh(logits / config.final_softcap)
    return mask_padding(logits, config.vocab_size)


# Jitted, so that all layers of one kind are traced and lowered once; XLA inlines them.
@functools.partial(jax.jit, static_argnames=("config", "window"))
def decoder_layer(
    layer: Layer,
    x,
    cached,
    mask,
    turn,
    pack: Packed | None = None,
    *,
    config: Config,
    window: int | None = None,
):
    """One layer: ``x [B, N, M]`` -> the same shape, and the block's keys and values.

    See ``attend`` for the other arguments.
    """
    h = rms_norm(x, layer.attn_norm, config)
    a, k, v = attend(
        layer, h, cached, mask, turn, config=config, window=window, pack=pack
    )
    x = x + _maybe_norm(a, layer.attn_post_norm, config)
    h = rms_norm(x, layer.mlp_norm, config)
    return x + _maybe_norm(mlp(config, layer, h), layer.mlp_post_norm, config), k, v


def attend(
    layer: Layer,
    h,
    cached,
    mask,
    turn,
    *,
    config: Config,
    window: int | None = None,
    before: tuple[Array, Array] | None = None,
    pack: Packed | None = None,
) -> tuple[Array, Array, Array]:
    """Attention of a block and its output product.

    Args:
      layer: its weights.  h: ``[B, N, I]`` normalised input, I as wide as ``qkv`` wants.
      cached: keys ``[B, K, D, S]``, values ``[B, K, S, D]`` and ``length [B]``.
      mask: as in ``block_attention``; of its own block a row sees no node after it.
      turn: from ``rope.turns``.
      config, window: static.
      before: keys and values ``[B, R, K, D]`` of block rows scored earlier, which are the
        first columns of ``mask [B, N, R + N]``.
      pack: where the nodes are, if ``h`` is ``[1, R, I]``; ``a`` is ``[1, R, M]`` then.

    Returns:
      ``(a [B, N, M], k, v [B, N, K, D])`` with the block's own keys, rotated, and values.
    """
    k_cache, v_cache, length = cached
    q, k, v, gate = project(config, layer, h)
    q, k = rope.rotate(q, turn), rope.rotate(k, turn)
    q, k, v = (packing.blocks(pack, x) for x in (q, k, v))
    k, v = k.astype(k_cache.dtype), v.astype(v_cache.dtype)
    keys, values = k, v
    if before is not None:
        keys = jnp.concatenate([before[0], k], 1)
        values = jnp.concatenate([before[1], v], 1)
    a = block_attention(
        q,
        k_cache,
        v_cache,
        length,
        keys,
        values,
        mask,
        scale=config.query_scale,
        window=window,
        softcap=config.attn_softcap,
        ordered=before is None,
    ).astype(h.dtype)
    return output(layer, packing.rows(pack, a), gate), k, v


def output(layer: Layer, a: Array, gate: Array | None) -> Array:
    """What heads ``a [B, N, H, D]`` add to the stream: ``[B, N, M]``."""
    if gate is not None:
        a = a * jax.nn.sigmoid(gate)
    return linear(a.reshape(*a.shape[:2], -1), layer.out, layer.out_bias)


def project(config: Config, layer: Layer, h: Array):
    """``q [B, N, H, D]``, ``k`` and ``v [B, N, K, D]`` before rotation, and the gate.

    The gate is ``[B, N, H, D]``, or None.
    """
    kv_heads, per_head, dim, _ = layer.qkv.shape
    qkv = linear(h, layer.qkv, layer.qkv_bias).reshape(
        *h.shape[:2], kv_heads, per_head, dim
    )
    q, gate = qkv[..., :-2, :].reshape(*h.shape[:2], config.heads, -1, dim), None
    if config.gated:
        gate = q[..., 1, :]
    q, k, v = q[..., 0, :], qkv[..., -2, :], qkv[..., -1, :]
    q, k = _maybe_norm(q, layer.q_norm, config), _maybe_norm(k, layer.k_norm, config)
    return q, k, v, gate


def mlp(config: Config, layer: Any, h: Array) -> Array:
    """The MLP of a layer, ordinary or of experts, on normalised ``h [B, N, M]``."""
    if isinstance(layer.mlp, moe.Moe):
        return moe.mixture(config, layer.mlp, h)
    return gated(config.activation, layer.mlp, h)


def rms_norm(x: Array, weight: Array, config: Config) -> Array:
    """RMSNorm over the last axis, computed in float32."""
    h = x.astype(jnp.float32)
    h = h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + config.norm_eps)
    w = weight.astype(jnp.float32)
    return (h * (1.0 + w if config.zero_centred else w)).astype(x.dtype)


def _maybe_norm(x: Array, weight: Array | None, config: Config) -> Array:
    return x if weight is None else rms_norm(x, weight, config)


def init(config: Config, key: Array, dtype=jnp.float32, scale: float = 0.02) -> Weights:
    """Random weights (normal, ``scale``; norms at their neutral value)."""
    k, g, d, m = (
        config.kv_heads,
        config.heads // config.kv_heads,
        config.head_dim,
        config.hidden,
    )
    neutral = 0.0 if config.zero_centred else 1.0
    per_head = (2 if config.gated else 1) * g + 2

    def normal(key, *shape):
        return scale * jax.random.normal(key, shape, dtype)

    def norm(size):
        return jnp.full(size, neutral, dtype)

    def layer(key, i):
        ks = jax.random.split(key, 8)
        return Layer(
            qkv=normal(ks[0], k, per_head, d, m),
            out=normal(ks[1], m, config.heads * d),
            mlp=moe.init(config, i, (ks[2], ks[3], ks[6], ks[7]), normal),
            attn_norm=norm(m),
            mlp_norm=norm(m),
            attn_post_norm=norm(m) if config.sandwich_norm else None,
            mlp_post_norm=norm(m) if config.sandwich_norm else None,
            q_norm=norm(d) if config.qk_norm else None,
            k_norm=norm(d) if config.qk_norm else None,
            qkv_bias=normal(ks[4], k, per_head, d) if config.qkv_bias else None,
            out_bias=normal(ks[5], m) if config.out_bias else None,
        )

    k_embed, k_head, *k_layers = jax.random.split(key, config.layers + 2)
    return Weights(
        embed=normal(k_embed, config.vocab_size, m),
        layers=tuple(layer(kl, i) for i, kl in enumerate(k_layers)),
        final_norm=norm(m),
        head=None if config.tie_embeddings else normal(k_head, config.vocab_size, m),
    )
