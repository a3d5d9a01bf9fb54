"""Drafters whose network extends a path by itself: EAGLE, multi-token prediction.

Such a network maps the feature of a position and the token after it to an estimate of the
next position's feature, with keys and values of its own. Pairs of committed tokens are
always fed with the target's true features: what was drafted on estimates is thrown away,
and the accepted path is fed again after every round.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec.cache import KV
from jspec.commit import emitted_tokens
from jspec.drafters.growth import Grower, Grown
from jspec.state import pending
from jspec.types import Array, Block, Context, Drafter, Feedback, Law


class Net(NamedTuple):
    """A network that extends paths. Pure functions; I is the width of what it is fed.

    Attributes:
      taps: the target's features it reads, as in ``Target.score``.
      init_cache: ``(batch, slots, dtype) -> cache``, with ``append``, ``crop``, ``length``.
      fuse: ``(params, features [..., F]) -> hidden [..., I]``.
      step: ``(params, cache, token [B, n], hidden [B, n, I], mask [B, n, R + n],
        depth [B, n], before) -> (out [B, n, M], kv)``. Row ``i`` is the pair of a feature
        and the token after it, at position ``cache.length + depth[i]``; ``before`` holds
        the keys and values of R earlier rows, or is None.
      feed: ``(params, out) -> hidden``, when the next pair has no true feature.
      logits: ``(params, out [..., M]) -> [..., V']`` of the token after the pair.
      to_target: ``params -> [V']`` int32 target ids, or None if the ids agree.
    """

    taps: tuple[int, ...]
    init_cache: Callable
    fuse: Callable
    step: Callable
    feed: Callable
    logits: Callable
    to_target: Callable


@struct.dataclass
class State:
    """``cache`` of the committed pairs, and ``out [B, M]`` of the newest of them."""

    cache: Any
    out: Array


class _At(NamedTuple):
    """One level of a growing tree.

    Attributes:
      out: ``[B, n, M]`` outputs.  reach: ``[B, n, R]``, which rows each of them sees.
      rows: keys and values of all R rows so far, or None.  level: ``n`` rows' depth.
    """

    out: Array
    reach: Array
    rows: KV | None
    level: int


@functools.cache
def recurrent(net: Net, grower: Grower, chunk: int = 64, dtype=jnp.float32) -> Drafter:
    """A drafter from a network and a way to grow blocks.

    Args:
      net: says what may follow.  grower: decides which nodes there are.
      chunk: prompt tokens fed at once.
      dtype: of the network's cache.
    """
    depth = grower.depth

    def init(params, context: Context) -> State:
        start = _empty(net, params, context, room(context, depth, chunk), dtype)
        feed = functools.partial(_feed_pairs, net, params)
        state = read_prompt(feed, start, context, chunk)
        slots = context.tokens.shape[1] + depth + 1
        return dataclasses.replace(state, cache=state.cache.crop(slots))

    def propose(params, state: State, key: Array, context: Context):
        to_target = net.to_target(params)
        batch = state.out.shape[0]
        root = _At(state.out[:, None], jnp.zeros((batch, 1, 0), bool), None, 0)
        grown = grower.grow(
            functools.partial(_extend, net, params, state.cache, to_target),
            root,
            net.logits(params, state.out),
            key,
            context.sampling,
        )
        return block(context, grown, state.cache.length, to_target, grower), state

    def update(params, state: State, feedback: Feedback) -> State:
        return _feed_pairs(net, params, state, *accepted_pairs(feedback))

    return Drafter(grower.shape(net.taps), init, propose, update)


def _feed_pairs(net: Net, params, state: State, features, token, count) -> State:
    """Feeds the first ``count [B]`` of a chain of true pairs ``[B, P]``."""
    batch, pairs = token.shape
    step = jnp.arange(pairs)
    mask = jnp.broadcast_to(step[:, None] >= step, (batch, pairs, pairs))
    depth = jnp.broadcast_to(step, (batch, pairs))
    hidden = net.fuse(params, features)
    out, kv = net.step(params, state.cache, token, hidden, mask, depth, None)
    newest = jnp.maximum(count - 1, 0)[:, None, None]
    newest = jnp.take_along_axis(out, newest, axis=1)[:, 0]
    return State(
        state.cache.append(kv, depth, count),
        jnp.where((count > 0)[:, None], newest, state.out),
    )


def accepted_pairs(feedback: Feedback) -> tuple[Array, Array, Array]:
    """The true pairs of a round: features ``[B, P, F]``, tokens ``[B, P]``, ``count [B]``."""
    verdict = feedback.verdict
    node = jnp.maximum(verdict.path, 0)
    features = cast(Array, feedback.features)
    features = jnp.take_along_axis(features, node[..., None], axis=1)
    return features, emitted_tokens(feedback.block, verdict), verdict.n_accept + 1


def room(context: Context, depth: int, chunk: int) -> int:
    """Slots that a cache needs while the prompt is read, and for a path of drafts."""
    width = context.tokens.shape[1]
    return width + -width % chunk + max(depth + 1, chunk)


def _empty(net: Net, params, context: Context, slots: int, dtype) -> State:
    """The state before the first pair."""
    batch = context.tokens.shape[0]
    cache = net.init_cache(batch, slots, dtype)
    token, features = context.tokens[:, :1], cast(Array, context.features)
    hidden = net.fuse(params, features[:, :1])
    one = jnp.ones((batch, 1, 1), bool)
    out, _ = jax.eval_shape(net.step, params, cache, token, hidden, one, token, None)
    return State(cache, jnp.zeros((batch, out.shape[-1]), out.dtype))


def read_prompt(feed: Callable, start: Any, context: Context, chunk: int) -> Any:
    """Feeds the pairs of the prompt, chunk by chunk: all tokens but the first.

    Args:
      feed: ``(state, features, token, count) -> state``, the first ``count [B]`` pairs of
        a chunk.
      start: a state whose ``cache`` has ``room``.
    """
    width = context.tokens.shape[1]
    pad = -width % chunk
    features = jnp.pad(cast(Array, context.features), ((0, 0), (0, pad), (0, 0)))
    token = jnp.pad(jnp.roll(context.tokens, -1, 1), ((0, 0), (0, pad)))
    pairs = context.length - 1

    def part(x, i):
        return lax.dynamic_slice_in_dim(x, i * chunk, chunk, axis=1)

    def feed_chunk(i, state: Any) -> Any:
        count = jnp.clip(pairs - i * chunk, 0, chunk)
        return feed(state, part(features, i), part(token, i), count)

    return lax.fori_loop(0, (jnp.max(pairs) + chunk - 1) // chunk, feed_chunk, start)


def _extend(net: Net, params, cache, to_target, at: _At, token: Array, row: Array):
    """``growth.Extend`` of a network: feeds its own estimates along the tree."""
    batch, count = token.shape
    reach = jnp.take_along_axis(at.reach, row[..., None], axis=1)
    own = jnp.broadcast_to(jnp.eye(count, dtype=bool), (batch, count, count))
    mask = jnp.concatenate([reach, own], -1)
    out = jnp.take_along_axis(at.out, row[..., None], axis=1)
    token = token if to_target is None else to_target[token]
    depth = jnp.full((batch, count), at.level)
    out, kv = net.step(
        params, cache, token, net.feed(params, out), mask, depth, at.rows
    )
    rows = kv
    if at.rows is not None:
        rows = jax.tree.map(lambda a, b: jnp.concatenate([a, b], 1), at.rows, kv)
    return net.logits(params, out), _At(out, mask, rows, at.level + 1)


def block(
    context: Context, grown: Grown, pairs: Array, to_target, grower: Grower
) -> Block:
    """Puts the root in front and names target ids; ``pairs [B]`` are committed."""
    last = pending(context)[:, None]
    # Without a feature, after a prompt of one token, there is nothing to go by.
    live = grown.live & (pairs > 0)[:, None]
    token = grown.token if to_target is None else to_target[grown.token]
    root = jnp.ones_like(last, bool)
    return Block(
        token=jnp.concatenate([last, token], 1).astype(jnp.int32),
        parent=jnp.concatenate([jnp.full_like(last, -1), grown.parent], 1),
        live=jnp.concatenate([root, live], 1),
        vote=jnp.ones((last.shape[0], grower.nodes), bool),
        law=Law(grown.q, to_target if grower.dense else None, replace=grower.replace),
    )
