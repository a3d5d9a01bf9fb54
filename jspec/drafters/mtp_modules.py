"""Several prediction modules, one for every depth of a draft.

Module ``m`` (0-based) continues module ``m - 1``: the row of a token ``x_{t+1}`` joins its
embedding to what module ``m - 1`` made of ``x_t``, and module 0 reads the target's own
hidden state. Every module has a cache of its own rows. A row of module ``m`` has a history
of ``m`` pairs to stand on, so its rows begin with the pair number ``m`` of a text.

Every token, committed or drafted, is a row of every module. After the token of depth ``d``
the next one is drafted by module ``d mod D``, so most rows of a short draft are never used,
and the compiler leaves out what they cost. Source: DeepSeek-V3 (arXiv 2412.19437), section
2.2; a draft longer than D begins again at module 0, fed what module D - 1 made.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jspec.drafters import eagle, layers
from jspec.drafters.eagle import Design, Weights
from jspec.drafters.growth import Grower
from jspec.drafters.recurrent import accepted_pairs, block, read_prompt, room
from jspec.types import Array, Context, Drafter, Feedback


@struct.dataclass
class State:
    """What the modules keep of the committed pairs.

    Attributes:
      caches: one per module; module ``m``'s lacks the first ``m`` pairs.
      out: ``[B, D, M]``, every module's output at the newest pair.
      pairs: ``[B]`` int32, how many there are.
    """

    caches: tuple[Any, ...]
    out: Array
    pairs: Array


class _At(NamedTuple):
    """One level of a growing block.

    Attributes:
      outs: per module ``[B, n, M]``.
      reach: ``[B, n, R]``, which rows each of the level's rows sees.
      rows: per module what all R rows so far left, or None.
      levels: of the R rows; static.
    """

    outs: tuple[Array, ...]
    reach: Array
    rows: tuple[Any, ...]
    levels: tuple[int, ...]


@functools.cache
def sequential(
    design: Design, modules: int, grower: Grower, chunk: int = 64, dtype=jnp.float32
) -> Drafter:
    """A drafter of ``modules`` modules; its params are as many ``Weights``.

    Args:
      design: of every module.  modules: D.
      grower: decides which nodes there are.
      chunk: prompt tokens fed at once.
      dtype: of the caches.
    """
    depth = grower.depth

    def init(params: tuple[Weights, ...], context: Context) -> State:
        batch, width = context.tokens.shape
        slots = room(context, depth, chunk)
        empty = layers.init_cache(design.config, batch, slots, dtype)
        out = jnp.zeros((batch, modules, design.config.hidden), params[0].embed.dtype)
        start = State((empty,) * modules, out, jnp.zeros(batch, jnp.int32))
        feed = functools.partial(_feed_pairs, design, params)
        state = read_prompt(feed, start, context, chunk)
        cut = tuple(cache.crop(width + depth + 1) for cache in state.caches)
        return dataclasses.replace(state, caches=cut)

    def propose(params, state: State, key: Array, context: Context):
        batch = state.out.shape[0]
        outs = tuple(state.out[:, m : m + 1] for m in range(modules))
        none = jnp.zeros((batch, 1, 0), bool)
        grown = grower.grow(
            functools.partial(_extend, design, params, state),
            _At(outs, none, (None,) * modules, ()),
            eagle.logits(design, params[0], state.out[:, 0]),
            key,
            context.sampling,
        )
        return block(context, grown, state.pairs, None, grower), state

    def update(params, state: State, feedback: Feedback) -> State:
        return _feed_pairs(design, params, state, *accepted_pairs(feedback))

    return Drafter(grower.shape(design.taps), init, propose, update)


def _feed_pairs(design: Design, params, state: State, features, token, count) -> State:
    """Feeds the first ``count [B]`` of a chain of true pairs ``[B, P]``."""
    batch, size = token.shape
    row = jnp.arange(size)
    causal = row[:, None] >= row
    newest = jnp.maximum(count - 1, 0)[:, None, None]
    hidden, outs, caches = features, [], []
    for m, weights in enumerate(params):
        # Rows whose history does not reach back far enough are computed, but not kept.
        skip = jnp.clip(m - state.pairs, 0, size)[:, None]
        mask = causal & ((row >= skip)[:, None] | jnp.eye(size, dtype=bool))
        depth = jnp.maximum(row - skip, 0)
        cache = state.caches[m]
        out, kv = eagle.step(design, weights, cache, token, hidden, mask, depth, None)
        path = jnp.minimum(row + skip, size - 1)
        caches.append(cache.append(kv, path, jnp.maximum(count - skip[:, 0], 0)))
        outs.append(jnp.take_along_axis(out, newest, axis=1))
        before = jnp.concatenate([state.out[:, m : m + 1], out[:, :-1]], 1)
        hidden = eagle.feed(design, weights, before)
    fed = (count > 0)[:, None, None]
    return State(
        tuple(caches),
        jnp.where(fed, jnp.concatenate(outs, 1), state.out),
        state.pairs + count,
    )


def _extend(design: Design, params, state: State, at: _At, token: Array, row: Array):
    """``growth.Extend``: all modules read the tokens of one more level."""
    batch, count = token.shape
    level = at.levels[-1] + 1 if at.levels else 0
    levels = at.levels + (level,) * count
    own = jnp.eye(count, len(levels), len(at.levels), dtype=bool)
    reach = jnp.take_along_axis(at.reach, row[..., None], axis=1)
    reach = jnp.pad(reach, ((0, 0), (0, 0), (0, count))) | own
    depth = jnp.full((batch, count), level)
    pairs = state.pairs[:, None]
    outs, rows = [], []
    for m, weights in enumerate(params):
        # A row goes back to module 0 and, while that has no feature, round again. After
        # a prompt of few tokens there are rows that end before the text begins.
        back = pairs + jnp.asarray(levels) - m
        begins = (back >= 0) & (back % len(params) < pairs)
        seen = reach & (begins[:, None] | own)
        source = jnp.take_along_axis(at.outs[m - 1], row[..., None], axis=1)
        hidden = eagle.feed(design, params[m - 1], source)
        before, cache = at.rows[m], state.caches[m]
        out, kv = eagle.step(design, weights, cache, token, hidden, seen, depth, before)
        outs.append(out)
        rows.append(kv if before is None else _joined(before, kv))
    drafts = (level + 1) % len(params)
    logits = eagle.logits(design, params[drafts], outs[drafts])
    return logits, _At(tuple(outs), reach, tuple(rows), levels)


def _joined(before, kv):
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], 1), before, kv)
