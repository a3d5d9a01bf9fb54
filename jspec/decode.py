"""Draft, verify, accept: one round, and the loop over rounds.

Everything here is a pure function of pytrees. No algorithm lives in ``decode_round``:
who drafts is the drafter's business and what is kept is the rule's. ``run`` is one
``lax.while_loop`` over rounds, so no host work happens between them.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from jspec import sampling as smp
from jspec import tree
from jspec.commit import commit, cut
from jspec.prefill import Filled, fill_at_once, fill_cache
from jspec.sampling import Sampling
from jspec.scoring import judged
from jspec.state import LENGTH, RUNNING, Info, Params, State, context, pending
from jspec.types import (
    Array,
    Block,
    Context,
    Drafter,
    DraftShape,
    Feedback,
    Rule,
    Target,
    chain,
)


def no_drafts() -> Drafter:
    """The empty drafter: every block is its root alone, which is plain decoding."""
    return _NO_DRAFTS


def _propose_nothing(params, state, key, seen):
    del params, key
    return chain(pending(seen)[:, None]), state


_NO_DRAFTS = Drafter(
    shape=DraftShape(nodes=1, depth=0),
    init=lambda params, context: (),
    propose=_propose_nothing,
    update=lambda params, state, feedback: state,
)


@functools.partial(
    jax.jit,
    static_argnames=(
        "target",
        "drafter",
        "slots",
        "chunk",
        "whole",
        "log_prob",
        "dtype",
    ),
)
def prefill(
    params: Params,
    sampling: Sampling,
    tokens: Array,
    length: Array,
    limit: Array,
    *,
    target: Target,
    drafter: Drafter,
    slots: int,
    chunk: int = 64,
    whole: int | None = None,
    log_prob: bool = False,
    dtype=jnp.float32,
) -> State:
    """Scores the prompts but for their last tokens, which become the pending ones.

    Args:
      params: weights of target and drafter.
      sampling: options of the B requests.
      tokens: ``[B, T]`` int32 prompts, left-aligned, T at least ``max(limit)``.
      length: ``[B]`` int32 prompt lengths, at least 1.
      limit: ``[B]`` int32, prompt and new tokens together, at most
        ``slots - drafter.shape.depth``.
      slots: cache capacity in tokens.
      chunk: prompt tokens scored at once.
      whole: instead of chunks, the width of a block that holds all prompts, see
        ``prefill.fill_at_once``.
      log_prob: record log-probabilities of the emitted tokens.
      dtype: of the cache.
    """
    fill = functools.partial(fill_cache, chunk=chunk)
    if whole is not None:
        fill = functools.partial(fill_at_once, width=whole)
    filled = fill(
        target,
        params.target,
        tokens,
        length,
        slots=slots,
        taps=drafter.shape.taps,
        dtype=dtype,
    )
    given = sampling, tokens, length, limit
    return begin(params, *given, filled, drafter=drafter, log_prob=log_prob)


def begin(
    params: Params,
    sampling: Sampling,
    tokens: Array,
    length: Array,
    limit: Array,
    filled: Filled,
    *,
    drafter: Drafter,
    log_prob: bool,
) -> State:
    """The state before the first round, from scored prompts; see ``prefill``."""
    seen = Context(tokens, length, sampling, filled.features)
    zeros = jnp.zeros_like(length)
    return State(
        cache=filled.cache,
        draft=drafter.init(params.draft, seen),
        sampling=sampling,
        tokens=tokens,
        length=length,
        start=length,
        limit=limit,
        reason=jnp.where(length < limit, RUNNING, LENGTH).astype(jnp.int32),
        round=zeros,
        proposed=jnp.zeros_like(tokens),
        emitted=jnp.zeros_like(tokens),
        log_prob=jnp.zeros(tokens.shape, jnp.float32) if log_prob else None,
    )


def decode_round(
    params: Params, state: State, *, target: Target, drafter: Drafter, rule: Rule
) -> tuple[State, Info]:
    """One round: propose, score, judge, append, tell the drafter.

    The keys of the round are folded from each row's own key and round number, so a row's
    output does not depend on what else is in the batch.

    Args:
      params: weights of target and drafter.
      state: as returned by ``prefill`` or by the round before.
      target: who is right.  drafter: who guesses.
      rule: which guesses to keep, for one sequence (see ``jspec.verify``).

    Returns:
      ``(state, info)``.
    """
    k_draft, k_judge = smp.row_keys(state.sampling, state.round)
    block, draft = drafter.propose(params.draft, state.draft, k_draft, context(state))
    mask = tree.ancestors(block.parent)
    block = _within_budget(block, mask, state)

    out, verdict, best = judged(
        params, state, block, k_judge, target=target, drafter=drafter, rule=rule
    )
    verdict, count, reason = cut(state, block, verdict, best, out)

    cache = state.cache.append(out.kv, verdict.path, count)
    draft = drafter.update(
        params.draft,
        draft,
        Feedback(block, verdict, out.logits, out.features, state.sampling),
    )
    info = Info(_proposed(block, mask), count)
    return commit(state, cache, draft, verdict, block, out, info, reason), info


def _within_budget(block: Block, mask: Array, state: State) -> Block:
    """Kills drafts that could not be committed: beyond the limit, or of ended rows."""
    room = state.limit - state.length  # tokens the row may still emit
    alive = (state.reason == RUNNING)[:, None]
    useful = tree.depth(mask) < room[:, None]
    root = jnp.arange(block.token.shape[1]) == 0
    return dataclasses.replace(block, live=block.live & ((useful & alive) | root))


def _proposed(block: Block, mask: Array) -> Array:
    """Depth of the deepest live draft, ``[B]``."""
    return jnp.max(jnp.where(block.live & block.vote, tree.depth(mask), 0), -1)


@functools.partial(
    jax.jit,
    static_argnames=("target", "drafter", "rule"),
    donate_argnames="state",
)
def run(
    params: Params,
    state: State,
    rounds: Array,
    *,
    target: Target,
    drafter: Drafter,
    rule: Rule,
) -> State:
    """At most ``rounds`` (a traced scalar) rounds, fewer when every row has ended.

    ``state`` is donated. One program serves whole generations and streaming alike.
    """

    def unfinished(carry):
        i, state = carry
        return (i < rounds) & jnp.any(state.reason == RUNNING)

    def body(carry):
        i, state = carry
        state, _ = decode_round(
            params, state, target=target, drafter=drafter, rule=rule
        )
        return i + 1, state

    return lax.while_loop(unfinished, body, (jnp.int32(0), state))[1]
