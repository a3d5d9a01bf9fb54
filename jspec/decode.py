"""Draft, verify, accept: one round, and the loop over rounds.

Everything here is a pure function of pytrees. No algorithm lives in ``decode_round``:
who drafts is the drafter's business and what is kept is the rule's. ``run`` is one
``lax.while_loop`` over rounds, so no host work happens between them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec import sampling as smp
from jspec import tree, verify
from jspec.prefill import fill_cache
from jspec.sampling import Sampling
from jspec.types import (
    POINT_MASS,
    Array,
    Block,
    Context,
    Drafter,
    DraftShape,
    DraftState,
    Feedback,
    Rule,
    Scores,
    Target,
    TargetLaw,
    Verdict,
    chain,
)

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


def no_drafts() -> Drafter:
    """The empty drafter: every block is its root alone, which is plain decoding."""
    return _NO_DRAFTS


def pending(context: Context) -> Array:
    """The last committed token ``[B]``, the root of the next block."""
    last = jnp.maximum(context.length - 1, 0)
    return jnp.take_along_axis(context.tokens, last[:, None], axis=1)[:, 0]


def _propose_nothing(params, state, key, context):
    del params, key
    return chain(pending(context)[:, None]), state


_NO_DRAFTS = Drafter(
    shape=DraftShape(nodes=1, depth=0),
    init=lambda params, context: (),
    propose=_propose_nothing,
    update=lambda params, state, feedback: state,
)


@functools.partial(
    jax.jit,
    static_argnames=("target", "drafter", "slots", "chunk", "log_prob", "dtype"),
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
      log_prob: record log-probabilities of the emitted tokens.
      dtype: of the cache.
    """
    cache, features = fill_cache(
        target,
        params.target,
        tokens,
        length,
        slots=slots,
        chunk=chunk,
        taps=drafter.shape.taps,
        dtype=dtype,
    )
    context = Context(tokens, length, sampling, features)
    zeros = jnp.zeros_like(length)
    return State(
        cache=cache,
        draft=drafter.init(params.draft, context),
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
    depth = drafter.shape.depth
    k_draft, k_judge = smp.row_keys(state.sampling, state.round)
    context = Context(state.tokens, state.length, state.sampling)
    block, draft = drafter.propose(params.draft, state.draft, k_draft, context)
    mask = tree.ancestors(block.parent)
    block = _within_budget(block, mask, state)

    out = score_live(target, params.target, state.cache, block, drafter.shape)
    law = smp.law(
        out.logits, state.sampling, state.tokens, state.length, state.start, block, mask
    )
    nodes, vocab = law.p.shape[1:]
    noise = smp.noise(k_judge, state.sampling, state.length, nodes, depth + 1, vocab)
    verdict = verify.batched(rule)(noise, block, law)
    verdict = dataclasses.replace(verdict, path=verdict.path[:, : depth + 1])
    verdict, count, reason = _cut(state, block, verdict, law, out)

    cache = state.cache.append(out.kv, verdict.path, count)
    draft = drafter.update(
        params.draft,
        draft,
        Feedback(block, verdict, out.logits, out.features, state.sampling),
    )
    info = Info(_proposed(block, mask), count)
    return _commit(state, cache, draft, verdict, block, out, info, reason), info


def score_live(
    target: Target, params, cache, block: Block, shape: DraftShape
) -> Scores:
    """Scores the narrowest prefix of the block that holds every live node.

    One compiled program has a branch for every width; rows of nodes that were left out
    are zero.
    """

    def narrow(width: int):
        part = jax.tree.map(
            lambda x: x[:, :width], dataclasses.replace(block, law=POINT_MASS)
        )
        out = target.score(params, cache, part, taps=shape.taps)
        rest = shape.nodes - width

        def fill(x):
            return jnp.pad(x, [(0, 0), (0, rest)] + [(0, 0)] * (x.ndim - 2))

        return jax.tree.map(fill, out) if rest else out

    branches = [functools.partial(narrow, w) for w in (*shape.widths, shape.nodes)]
    beyond = [jnp.any(block.live[:, w:]) for w in shape.widths]
    if not beyond:
        return narrow(shape.nodes)
    return lax.switch(sum(b.astype(jnp.int32) for b in beyond), branches)


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


def emitted_tokens(block: Block, verdict: Verdict) -> Array:
    """Accepted drafts followed by the correction or bonus, ``[B, P]``.

    Entries after ``n_accept`` repeat ``next_token``.
    """
    after = jnp.roll(verdict.path, -1, axis=1)
    drafts = jnp.take_along_axis(block.token, jnp.maximum(after, 0), axis=1)
    step = jnp.arange(verdict.path.shape[1])
    is_draft = step < verdict.n_accept[:, None]
    return jnp.where(is_draft, drafts, verdict.next_token[:, None])


def _cut(state: State, block: Block, verdict: Verdict, law: TargetLaw, out: Scores):
    """The verdict cut at an end-of-sequence token, at the budget and at a fault.

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
    fault = first(~jnp.isfinite(_top_logit(out.logits, law, verdict)))
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


def _top_logit(logits: Array, law: TargetLaw, verdict: Verdict) -> Array:
    """The logit of the best token at every path node ``[B, P]``.

    It is NaN or infinite if and only if the row holds a NaN or +inf, or nothing but
    -inf: one gather instead of a pass over ``[B, N, V]``.
    """
    node = jnp.maximum(verdict.path, 0)
    best = jnp.take_along_axis(law.best, node, axis=1)
    batch = jnp.arange(logits.shape[0])[:, None]
    return jnp.where(verdict.path < 0, 0.0, logits[batch, node, best])


def _commit(
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
