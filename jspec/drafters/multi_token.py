"""Multi-token prediction with parallel heads: one transformer layer a head.

Gloeckle et al. 2404.19737. All heads read the trunk's output, the residual stream under
the target's last layer, and share its final norm and vocabulary product; the target's
last layer is the paper's first head. A layer attends to the whole text, so each head
keeps keys and values of its own.
"""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec import cache as kv_cache
from jspec import tree
from jspec.cache import KV, KVCache
from jspec.drafters.feature_heads import check, tree_drafter
from jspec.drafters.growth import Grower
from jspec.models.config import Config
from jspec.models.linear import linear
from jspec.models.rope import turns
from jspec.models.transformer import Layer, Weights, decoder_layer, rms_norm
from jspec.tree import Topology
from jspec.types import Array, Context, Drafter, Feedback


@struct.dataclass
class MultiToken:
    """Parallel heads.

    Attributes:
      layers: one each for the tokens 1, 2, ... after the pending one.
      norm: ``[M]``, shared: the target's final norm.
      vocab: ``[V', M]``, shared: the target's own.
      to_target: ``[V']`` int32, head row -> target id, or None where they agree.
    """

    layers: tuple[Layer, ...]
    norm: Array
    vocab: Array
    to_target: Array | None = None


@struct.dataclass
class State:
    """Keys and values of the committed tokens but the pending one, a layer a head, and
    ``hidden [B, K, M]``, the heads' outputs at the last of them."""

    cache: KVCache
    hidden: Array


def init_multi_token(target: Weights, count: int) -> MultiToken:
    """Heads that start as copies of the target's last layer."""
    return MultiToken(
        layers=target.layers[-1:] * count,
        norm=target.final_norm,
        vocab=target.embed if target.head is None else target.head,
    )


def empty_cache(
    weights: MultiToken, config: Config, batch: int, slots: int, dtype
) -> KVCache:
    """A cache with one layer a head."""
    return kv_cache.init(
        len(weights.layers), batch, config.kv_heads, config.head_dim, slots, dtype
    )


def multi_token_forward(
    weights: MultiToken,
    x: Array,
    cache: KVCache,
    config: Config,
    mask: Array | None = None,
) -> tuple[Array, KV]:
    """Outputs ``[B, N, K, M]`` of all heads on trunk rows ``x [B, N, M]``.

    Their products with ``vocab`` are the logits. ``mask [B, N, N]`` says which rows a row
    sees besides the cache, itself included; its position is ``cache.length`` and the
    number of the others. None: the rows follow one another. The cache is only read, and
    the rows' own keys and values are returned.
    """
    if mask is None:
        mask = jnp.tril(jnp.ones((len(x), *x.shape[1:2] * 2), bool))
    position = cache.length[:, None] + tree.depth(mask)
    turn = turns(config.ropes[-1], config.head_dim, position)
    outputs = [
        decoder_layer(
            layer,
            x,
            (k, v, cache.length),
            mask,
            turn,
            config=config,
            window=config.windows[-1],
        )
        for layer, k, v in zip(weights.layers, cache.k, cache.v, strict=True)
    ]
    hidden, ks, vs = zip(*outputs, strict=True)
    return rms_norm(jnp.stack(hidden, 2), weights.norm, config), KV(ks, vs)


def multi_token(
    weights: MultiToken,
    config: Config,
    topology: Topology | Grower | None = None,
    *,
    tap: int | None = None,
    chunk: int = 64,
) -> Drafter:
    """Drafts with parallel heads; the weights are the drafter's params.

    Args:
      weights: the heads.
      config: the target's; the heads' layers are like its last one.
      topology: which combinations of guesses to verify; None is a chain of one token a
        head.
      tap: the target layer whose residual stream is the trunk's output; None is the one
        under the last layer, as in the paper.
      chunk: prompt tokens fed at once.

    Raises:
      ValueError: as ``jspec.drafters.medusa``.
    """
    count = len(weights.layers)
    topology = tree.line(count) if topology is None else topology
    grower = check(weights, count, weights.vocab, config.vocab_size, topology)
    tap = config.layers - 1 if tap is None else tap
    return _multi_token(config, grower, tap, chunk)


@functools.cache
def _multi_token(config: Config, grower: Grower, tap: int, chunk: int) -> Drafter:
    path_rows = grower.depth + 1

    def used(weights: MultiToken) -> MultiToken:
        return dataclasses.replace(weights, layers=weights.layers[: grower.depth])

    def init(params, context: Context):
        return _prefill(used(params), context, config, path_rows, chunk)

    def guess(weights: MultiToken, k: int, state: State, path: Array) -> Array:
        del path
        return linear(state.hidden[:, k], weights.vocab)[:, None]

    def update(params, state: State, feedback: Feedback):
        assert feedback.features is not None
        n = feedback.verdict.n_accept
        node = jnp.maximum(feedback.verdict.path, 0)[..., None]
        x = jnp.take_along_axis(feedback.features, node, axis=1)
        hidden, kv = multi_token_forward(used(params), x, state.cache, config)
        rows = jnp.broadcast_to(jnp.arange(path_rows), x.shape[:2])
        return State(
            cache=state.cache.append(kv, rows, n + 1),
            hidden=_row(hidden, n, state.hidden),
        )

    return tree_drafter(guess, grower, config.vocab_size, tap, init, update)


def _prefill(
    weights: MultiToken, context: Context, config: Config, slack: int, chunk: int
) -> State:
    """Feeds the features of all committed tokens but the pending one, in chunks."""
    assert context.features is not None
    batch, width, size = context.features.shape
    features = jnp.pad(context.features, ((0, 0), (0, -width % chunk), (0, 0)))
    slots = width + slack
    # A chunk writes all its rows at `length`: room for one more, cropped afterwards.
    cache = empty_cache(weights, config, batch, slots + chunk, features.dtype)
    rows = jnp.broadcast_to(jnp.arange(chunk), (batch, chunk))

    def feed(i, state: State):
        at = i * chunk
        x = lax.dynamic_slice_in_dim(features, at, chunk, axis=1)
        hidden, kv = multi_token_forward(weights, x, state.cache, config)
        count = jnp.clip(context.length - 1 - at, 0, chunk)
        return State(
            cache=state.cache.append(kv, rows, count),
            hidden=_row(hidden, count - 1, state.hidden),
        )

    empty = jnp.zeros((batch, len(weights.layers), size), features.dtype)
    chunks = (jnp.max(context.length) - 1 + chunk - 1) // chunk
    state = lax.fori_loop(0, chunks, feed, State(cache, empty))
    return dataclasses.replace(state, cache=state.cache.crop(slots))


def _row(hidden: Array, row: Array, old: Array) -> Array:
    """Row ``row [B]`` of ``hidden [B, N, K, M]``, or ``old [B, K, M]`` where it is -1."""
    at = jnp.maximum(row, 0)[:, None, None, None]
    new = jnp.take_along_axis(hidden, at, axis=1)[:, 0]
    return jnp.where((row >= 0)[:, None, None], new, old)
