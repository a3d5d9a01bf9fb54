"""From a verdict to committed tokens: where a row ends, and what is written down."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jspec.state import EOS, FAULT, LENGTH, RUNNING, Info, State
from jspec.types import Array, Block, DraftState, Scores, Verdict


def emitted_tokens(block: Block, verdict: Verdict) -> Array:
    """Accepted drafts followed by the correction or bonus, ``[B, P]``.

    Entries after ``n_accept`` repeat ``next_token``.
    """
    after = jnp.roll(verdict.path, -1, axis=1)
    drafts = jnp.take_along_axis(block.token, jnp.maximum(after, 0), axis=1)
    step = jnp.arange(verdict.path.shape[1])
    is_draft = step < verdict.n_accept[:, None]
    return jnp.where(is_draft, drafts, verdict.next_token[:, None])


def cut(state: State, block: Block, verdict: Verdict, best: Array, out: Scores):
    """The verdict cut at an end-of-sequence token, at the budget and at a fault.

    ``best [B, N]`` is the target's best token at every node.

    Returns the cut verdict, the number of tokens to commit ``[B]`` and why a row ends.
    """
    tokens = emitted_tokens(block, verdict)
    steps = tokens.shape[1]
    step = jnp.arange(steps)
    running = state.reason == RUNNING
    room = state.limit - state.length
    wanted = jnp.minimum(verdict.n_accept + 1, room)

    def first(hit):  # first step at which it happens, or `steps`
        return jnp.min(jnp.where(hit & (step < wanted[:, None]), step, steps), -1)

    end = first(jnp.isin(tokens, state.sampling.eos))
    fault = first(~jnp.isfinite(_top_logit(out.logits, best, verdict)))
    count = jnp.minimum(jnp.minimum(wanted, end + 1), fault)
    count = jnp.where(running, count, 0)
    reason = jnp.where(count == room, LENGTH, RUNNING)
    reason = jnp.where(end < count, EOS, reason)
    reason = jnp.where(fault < jnp.minimum(end + 1, wanted), FAULT, reason)
    reason = jnp.where(running, reason, state.reason).astype(jnp.int32)

    last = jnp.maximum(count - 1, 0)[:, None]
    cut = Verdict(
        path=jnp.where(step < count[:, None], verdict.path, -1),
        n_accept=jnp.minimum(verdict.n_accept, count - 1),
        next_token=jnp.take_along_axis(tokens, last, axis=1)[:, 0],
    )
    return cut, count, reason


def _top_logit(logits: Array, best: Array, verdict: Verdict) -> Array:
    """The logit of the best token at every path node ``[B, P]``.

    It is NaN or infinite if and only if the row holds a NaN or +inf, or nothing but
    -inf: one gather instead of a pass over ``[B, N, V]``.
    """
    node = jnp.maximum(verdict.path, 0)
    best = jnp.take_along_axis(best, node, axis=1)
    batch = jnp.arange(logits.shape[0])[:, None]
    return jnp.where(verdict.path < 0, 0.0, logits[batch, node, best])


def commit(
    state: State,
    cache: Any,
    draft: DraftState,
    verdict: Verdict,
    block: Block,
    out: Scores,
    info: Info,
    reason: Array,
) -> State:
    """Writes the emitted tokens and the round's record into the state."""
    count = info.emitted
    tokens = emitted_tokens(block, verdict)
    new = jnp.arange(state.tokens.shape[1]) - state.length[:, None]
    is_new = (new >= 0) & (new < count[:, None])
    at = jnp.clip(new, 0, tokens.shape[1] - 1)

    def insert(old, values):  # values [B, P] at positions length .. length + count
        return jnp.where(is_new, jnp.take_along_axis(values, at, axis=1), old)

    log_prob = state.log_prob
    if log_prob is not None:
        log_prob = insert(log_prob, _plain_log_prob(out.logits, verdict, tokens))
    running = state.reason == RUNNING
    here = (jnp.arange(state.tokens.shape[1]) == state.round[:, None]) & running[
        :, None
    ]
    return dataclasses.replace(
        state,
        cache=cache,
        draft=draft,
        tokens=insert(state.tokens, tokens),
        length=state.length + count,
        reason=reason,
        round=state.round + running,
        proposed=jnp.where(here, info.proposed[:, None], state.proposed),
        emitted=jnp.where(here, count[:, None], state.emitted),
        log_prob=log_prob,
    )


def _plain_log_prob(logits: Array, verdict: Verdict, tokens: Array) -> Array:
    """Log-probability of ``tokens [B, P]``, each judged at its path node."""
    node = jnp.maximum(verdict.path, 0)
    batch = jnp.arange(logits.shape[0])[:, None]
    total = jax.nn.logsumexp(logits, axis=-1)
    return logits[batch, node, tokens] - total[batch, node]
