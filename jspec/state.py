"""What a batch of requests carries from round to round."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jspec.sampling import Sampling
from jspec.types import Array, Context, DraftState

# Why a row ended. A row runs while its reason is RUNNING.
RUNNING, EOS, LENGTH, STOP, FAULT = range(5)


class Params(NamedTuple):
    """Weights of the target and of the drafter."""

    target: Any
    draft: Any = None


class Info(NamedTuple):
    """What one round did, for whoever watches; never carried.

    Attributes:
      proposed: ``[B]`` int32, depth of the deepest live draft.
      emitted: ``[B]`` int32, tokens committed (accepted drafts and one more, after the
        cut at an end-of-sequence token and at the budget); 0 for a row that had ended.
    """

    proposed: Array
    emitted: Array


@struct.dataclass
class State:
    """Everything a batch of requests carries from round to round.

    Attributes:
      cache: the target's cache; ``cache.length == length - 1``.
      draft: the drafter's state.
      sampling: per-row sampling options and keys.
      tokens: ``[B, T]`` int32; entries at ``>= length`` are undefined.
      length: ``[B]`` int32, committed tokens, the pending one included.
      start: ``[B]`` int32, prompt tokens.
      limit: ``[B]`` int32, the row ends when ``length`` reaches it.
      reason: ``[B]`` int32, RUNNING or why the row ended.
      round: ``[B]`` int32, rounds this row has taken part in.
      proposed, emitted: ``[B, T]`` int32, ``Info`` of every round of the row.
      log_prob: ``[B, T]`` float32, log-probability of each emitted token under the
        plain model (raw logits, temperature 1), or None when nobody asked.
    """

    cache: Any
    draft: DraftState
    sampling: Sampling
    tokens: Array
    length: Array
    start: Array
    limit: Array
    reason: Array
    round: Array
    proposed: Array
    emitted: Array
    log_prob: Array | None


def pending(context: Context) -> Array:
    """The last committed token ``[B]``, the root of the next block."""
    last = jnp.maximum(context.length - 1, 0)
    return jnp.take_along_axis(context.tokens, last[:, None], axis=1)[:, 0]


def context(state: State) -> Context:
    """What a drafter sees of ``state`` in a round."""
    return Context(state.tokens, state.length, state.sampling, cache=state.cache)


@functools.partial(jax.jit, donate_argnames="state")
def truncate(state: State, length: Array, reason: Array) -> State:
    """Cuts rows to ``length [B]`` committed tokens, as if no more had been emitted.

    Tokens, log-probabilities, round records and the cache are cut alike. ``reason [B]``
    says anew why each row ended, RUNNING for those that have not.
    """
    total = jnp.cumsum(state.emitted, -1)
    before = total - state.emitted
    room = (length - state.start)[:, None]
    return dataclasses.replace(
        state,
        cache=state.cache.rewind(jnp.minimum(state.cache.length, length - 1)),
        length=length,
        reason=reason,
        emitted=jnp.clip(room - before, 0, state.emitted),
        round=jnp.sum((before < room) & (state.emitted > 0), -1, dtype=jnp.int32),
    )
