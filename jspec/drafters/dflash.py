"""DFlash: a whole block of guesses from one pass over mask tokens.

The rows are guesses of their own or of the next position, and no guess sees another: given
the text, the law of a block is the product of the rows'. Source: Chen et al. 2602.06036.
DFlash-2 and DSpark choose the tokens of a block one after the other (``block_selector``,
``dspark``), which is all that differs: ``Design.choose``.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import cast

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec import cache as kv_cache
from jspec import sampling as smp
from jspec.cache import KV, KVCache
from jspec.drafters.diffusion import (
    Design,
    Drafts,
    Weights,
    context_kv,
    forward,
    logits,
)
from jspec.state import pending
from jspec.types import (
    Array,
    Block,
    Context,
    Drafter,
    DraftShape,
    Feedback,
    Law,
    chain,
)

_FEW = 2  # tokens whose keys and values are made without those of the whole block


def independent(
    design: Design, params: Weights, hidden: Array, anchor: Array, key: Array, sampling
) -> Drafts:
    """Draws every row by itself: DFlash.

    ``hidden [B, G, M]`` is normed, ``anchor [B]`` the token before the block's guesses,
    ``key [B]``. All ways to choose have these arguments.
    """
    del anchor
    return draw_rows(logits(design, params, hidden), key, sampling)


def draw_rows(logits: Array, key: Array, sampling) -> Drafts:
    """Draws every row of ``logits [B, G, V']`` by itself; ``key [B]``."""
    keys = jax.vmap(lambda k: jax.random.split(k, logits.shape[1]))(key)
    return Drafts(*jax.vmap(smp.draft, (1, 1, None), 1)(logits, keys, sampling))


@struct.dataclass
class State:
    """What is carried from round to round.

    Attributes:
      cache: keys and values made of the features of the committed tokens but the pending
        one.
      confidence: ``[B, G]`` of the guesses proposed last, 1 before that; None without a
        confidence head. A scheduler may read it between ``propose`` and the verdict.
    """

    cache: KVCache
    confidence: Array | None = None


@functools.cache
def drafter(
    design: Design,
    gamma: int | None = None,
    *,
    rows: int | None = None,
    least: float = 0.0,
    dense: bool = True,
    dtype=jnp.float32,
) -> Drafter:
    """Drafts chains; its params are ``Weights``.

    Args:
      design: the drafter.
      gamma: drafts a round; all that a block holds unless given.
      rows: rows of the block that is computed, from as many as ``gamma`` needs to
        ``design.block``; the least unless given. Short blocks cost less, but rows were
        trained with all others beside them.
      least: drafts live up to the first whose confidence is below this (static
        gating of DSpark). The confidence of a draft is known before it is drawn.
      dense: draw from the drafter's law; if not, its best guesses as point masses.
      dtype: of the context's keys and values.

    Raises:
      ValueError: sizes the drafter was not trained for; ``least`` without a confidence
        head, as soon as weights are seen.
    """
    gamma = design.most if gamma is None else gamma
    needed = gamma if design.next_token else gamma + 1
    rows = needed if rows is None else rows
    check_sizes(design, gamma, rows, needed)

    def init(params: Weights, context: Context) -> State:
        if least > 0 and params.confidence is None:
            raise ValueError(
                f"least is {least}, but the drafter has no confidence head; use 0"
            )
        batch, width = context.tokens.shape
        config = design.config
        cache = kv_cache.init(
            config.layers,
            batch,
            config.kv_heads,
            config.head_dim,
            width + gamma + 1,
            dtype,
        )
        path = jnp.broadcast_to(jnp.arange(width), (batch, width))
        features = cast(Array, context.features)
        cache = inject(design, params, cache, features, path, context.length - 1)
        return State(cache, _unknown(params, batch))

    def propose(params: Weights, state: State, key: Array, context: Context):
        anchor = pending(context)
        hidden = forward(design, params, state.cache, anchor, rows)
        hidden = hidden[:, needed - gamma : needed]
        sampling = context.sampling
        if not dense:
            cold = jnp.zeros_like(sampling.temperature)
            sampling = dataclasses.replace(sampling, temperature=cold)
        drafts = design.choose(design, params, hidden, anchor, key, sampling)
        live = jnp.ones(drafts.token.shape, bool)
        if least > 0:
            live = jnp.cumprod(drafts.confidence >= least, 1).astype(bool)
        return (
            block(params.to_target, anchor, drafts, live, dense),
            dataclasses.replace(state, confidence=drafts.confidence),
        )

    def update(params: Weights, state: State, feedback: Feedback) -> State:
        path, count = feedback.verdict.path, feedback.verdict.n_accept + 1
        features = cast(Array, feedback.features)
        cache = inject(design, params, state.cache, features, path, count)
        return State(cache, _unknown(params, path.shape[0]))

    def _unknown(params: Weights, batch: int) -> Array | None:
        return None if params.confidence is None else jnp.ones((batch, gamma))

    shape = DraftShape(gamma + 1, gamma, design.taps, dense, widths(gamma, least))
    return Drafter(shape, init, propose, update)


def inject(
    design: Design,
    params: Weights,
    cache: KVCache,
    features: Array,
    path: Array,
    count: Array,
) -> KVCache:
    """Adds the first ``count [B]`` of the tokens ``path [B, P]`` to the context.

    ``features [B, N, F]`` are those of N tokens in a row, the first of them right after
    the cache; ``path`` picks from them.
    """
    rows = features.shape[1]
    position = cache.length[:, None] + jnp.arange(rows)

    def of_first(n: int) -> KV:
        kv = context_kv(design, params, features[:, :n], position[:, :n])
        pads = (0, 0), (0, rows - n), (0, 0), (0, 0)
        return jax.tree.map(lambda x: jnp.pad(x, pads), kv)

    # Most rounds keep few drafts, however many they propose.
    few = min(_FEW, rows)
    fits = jnp.max(jnp.where(jnp.arange(path.shape[1]) < count[:, None], path, 0)) < few
    kv = lax.cond(fits, lambda: of_first(few), lambda: of_first(rows))
    return cache.append(kv, path, count)


def check_sizes(design: Design, gamma: int, rows: int, needed: int) -> None:
    """Refuses blocks that the drafter was not trained for."""
    if not 1 <= gamma <= design.most:
        raise ValueError(
            f"gamma is {gamma}; blocks of {design.block} rows give 1 to {design.most} "
            "drafts, and a longer block was never trained"
        )
    if not needed <= rows <= design.block:
        raise ValueError(
            f"{rows} rows; {gamma} drafts need {needed}, and the drafter was trained on "
            f"{design.block}"
        )


def widths(gamma: int, least: float) -> tuple[int, ...]:
    """Cheaper forwards for rounds that a threshold cuts short."""
    return tuple(w for w in (1, 2, 4, 8) if w <= gamma) if least > 0 else ()


def block(
    ids: Array | None, anchor: Array, drafts: Drafts, live: Array, dense: bool
) -> Block:
    """The chain ``anchor -> draft 1 -> ..`` in target ids, with its law.

    ``ids [V']`` are the target's of a draft vocabulary, ``live [B, G]`` says of drafts.
    """
    token = drafts.token if ids is None else ids[drafts.token]
    law = Law()
    if dense:
        q = jnp.pad(drafts.law, ((0, 0), (0, 1), (0, 0)))  # nothing follows the last
        law = Law(q, ids)
    root = jnp.ones_like(live[:, :1])
    token = jnp.concatenate([anchor[:, None], token], 1)
    return chain(token, jnp.concatenate([root, live], 1), law)
