"""A drafter without a cache: a few layers that read the target's keys and values.

Gemma 4's assistant. Its layers have queries only; each attends what one layer of the
target has stored of the committed tokens, which stays as it is while a round is drafted.
So nothing is prefilled, nothing is appended, and all drafts of a round are made at the
position of the pending token. What distinguishes them is the input, the token drafted
last beside a hidden state:

    x = enter [embed(token); hidden]        first the target's own, after that leave(out)

Source: transformers' ``Gemma4AssistantForCausalLM``, which the tests compare it with.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec import sampling as smp
from jspec.models import rope
from jspec.models.config import Config
from jspec.models.linear import linear, looked_up
from jspec.models.mlp import Mlp, gated
from jspec.models.transformer import rms_norm
from jspec.pallas import block_attention
from jspec.state import pending
from jspec.types import Array, Context, Drafter, DraftShape, Feedback, Law, chain


@dataclasses.dataclass(frozen=True)
class Design:
    """What an assistant is apart from its weights.

    Attributes:
      config: of its layers. ``windows`` count cached tokens; ``head_dim`` and ``kv_heads``
        are the target's business and not read.
      sources: per layer, the target's layer whose keys and values it reads.
      embed_scale: factor on the target's embedding.
      clusters: clusters of tokens whose logits are computed, with ``Weights.centroids``.
    """

    config: Config
    sources: tuple[int, ...]
    embed_scale: float = 1.0
    clusters: int = 0


@struct.dataclass
class Layer:
    """One layer: ``query [H, D, M]``, ``out [M, H * D]``, ``q_norm [D]``, ``scale [1]``.

    ``attn_norm``, ``attn_post_norm``, ``mlp_norm`` and ``mlp_post_norm`` are ``[M]``, before
    and after attention and MLP; ``scale`` multiplies what leaves the layer.
    """

    query: Array
    out: Array
    mlp: Mlp
    attn_norm: Array
    attn_post_norm: Array
    mlp_norm: Array
    mlp_post_norm: Array
    q_norm: Array
    scale: Array


@struct.dataclass
class Weights:
    """An assistant of width M for a target of width E.

    Attributes:
      embed: ``[V, E]``, the target's.
      enter: ``[M, 2 E]``.  leave: ``[E, M]``.
      layers, final_norm ``[M]``, head ``[V, M]``.
      centroids: ``[C, M]``, or None: then all logits are computed.
      members: ``[C, V / C]`` int32, the ids of every cluster.
    """

    embed: Array
    enter: Array
    leave: Array
    layers: tuple[Layer, ...]
    final_norm: Array
    head: Array
    centroids: Array | None = None
    members: Array | None = None


class View(NamedTuple):
    """What one layer reads of the target's cache, the same for all drafts of a round.

    Attributes:
      k, v: as in ``KVCache``.  length: ``[B]`` of them, without the newest token.
      own_k, own_v: ``[B, 1, K, D]`` of the newest token. A block has a key of its own,
        and this is it.
      turn: the rotation of the pending token's position.
    """

    k: Array
    v: Array
    length: Array
    own_k: Array
    own_v: Array
    turn: rope.Turns


def views(design: Design, weights: Weights, cache: Any) -> tuple[View, ...]:
    """A ``View`` a layer of the committed tokens but the pending one in a ``KVCache``."""
    newest = jnp.maximum(cache.length - 1, 0)
    at = newest[:, None, None, None]

    def one(i: int, layer: Layer) -> View:
        k, v = cache.k[design.sources[i]], cache.v[design.sources[i]]
        own_k = jnp.take_along_axis(k, at, axis=3).transpose(0, 3, 1, 2)
        own_v = jnp.take_along_axis(v, at, axis=2).transpose(0, 2, 1, 3)
        dim = layer.query.shape[1]
        turn = rope.turns(design.config.ropes[i], dim, cache.length[:, None])
        return View(k, v, newest, own_k, own_v, turn)

    return tuple(one(i, layer) for i, layer in enumerate(weights.layers))


def step(
    design: Design,
    weights: Weights,
    seen: tuple[View, ...],
    token: Array,
    hidden: Array,
) -> tuple[Array, Array]:
    """The logits ``[B, V]`` after ``token [B]``, and the hidden state that comes next.

    Args:
      seen: from ``views``.
      hidden: ``[B, E]`` of the token before it: the target's last hidden state after its
        final norm, or what this function returned.
    """
    embedded = looked_up(weights.embed, token, hidden.dtype) * design.embed_scale
    x = linear(jnp.concatenate([embedded, hidden], -1), weights.enter)[:, None]
    for i, layer in enumerate(weights.layers):
        x = _layer(design, i, layer, seen[i], x)
    out = rms_norm(x, weights.final_norm, design.config)[:, 0]
    return _logits(design, weights, out), linear(out, weights.leave)


def _layer(design: Design, i: int, layer: Layer, view: View, x: Array) -> Array:
    config = design.config
    h = rms_norm(x, layer.attn_norm, config)
    a = _attend(design, i, layer, view, h)
    x = x + rms_norm(a, layer.attn_post_norm, config)
    h = rms_norm(x, layer.mlp_norm, config)
    h = gated(config.activation, layer.mlp, h)
    x = x + rms_norm(h, layer.mlp_post_norm, config)
    return x * layer.scale.astype(x.dtype)


def _attend(design: Design, i: int, layer: Layer, view: View, h: Array) -> Array:
    """Attention of ``h [B, 1, M]`` over the committed tokens, the pending one left out."""
    config = design.config
    heads, dim, _ = layer.query.shape
    q = linear(h, layer.query).reshape(*h.shape[:2], heads, dim)
    q = rope.rotate(rms_norm(q, layer.q_norm, config), view.turn)
    a = block_attention(
        q,
        view.k,
        view.v,
        view.length,
        view.own_k,
        view.own_v,
        jnp.ones((len(q), 1, 1), bool),
        scale=config.query_scale,
        window=config.windows[i],
    )
    return linear(a.astype(h.dtype).reshape(*h.shape[:2], -1), layer.out)


def _logits(design: Design, weights: Weights, out: Array) -> Array:
    """Logits of ``out [B, M]``; -inf for tokens of clusters that are not looked into."""
    if weights.centroids is None:
        return linear(out, weights.head).astype(jnp.float32)
    _, best = lax.top_k(linear(out, weights.centroids), design.clusters)
    ids = cast(Array, weights.members)[best].reshape(len(out), -1)
    found = jnp.einsum("bnm,bm->bn", weights.head[ids], out).astype(jnp.float32)
    rest = jnp.full((len(out), len(weights.head)), -jnp.inf)
    return rest.at[jnp.arange(len(out))[:, None], ids].set(found)


@functools.cache
def drafter(design: Design, gamma: int = 4) -> Drafter:
    """Drafts chains of ``gamma`` tokens; its params are ``Weights``.

    Raises:
      ValueError: ``gamma < 1``.
    """
    if gamma < 1:
        raise ValueError(f"gamma is {gamma}; a drafter needs at least 1")

    def init(params: Weights, context: Context) -> Array:
        """The hidden state ``[B, E]`` before the pending token; zeros if there is none."""
        last = jnp.maximum(context.length - 2, 0)[:, None, None]
        features = cast(Array, context.features)
        return jnp.take_along_axis(features, last, axis=1)[:, 0]

    def propose(params: Weights, state: Array, key: Array, context: Context):
        keys = jax.vmap(lambda k: jax.random.split(k, gamma), out_axes=1)(key)
        seen = views(design, params, context.cache)

        def one(carry, keys):
            logits, hidden = step(design, params, seen, *carry)
            drawn, law = smp.draft(logits, keys, context.sampling)
            return (drawn, hidden), (drawn, law)

        root = pending(context)
        _, (drawn, laws) = lax.scan(one, (root, state), keys)
        token = jnp.concatenate([root[:, None], drawn.T], 1)
        laws = jnp.pad(laws.swapaxes(0, 1), ((0, 0), (0, 1), (0, 0)))
        return chain(token, law=Law(q=laws)), state

    def update(params: Weights, state: Array, feedback: Feedback) -> Array:
        verdict, features = feedback.verdict, cast(Array, feedback.features)
        count = verdict.n_accept[:, None]
        node = jnp.take_along_axis(verdict.path, jnp.maximum(count, 0), 1)
        new = jnp.take_along_axis(features, node[..., None], axis=1)[:, 0]
        return jnp.where(count >= 0, new, state)

    shape = DraftShape(gamma + 1, gamma, taps=(-1,), dense=True)
    return Drafter(shape, init, propose, update)
