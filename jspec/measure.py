"""The measured terms of ``L = (T_draft + T_verify) / tau`` on this device.

Every time is of the real functions on a state in the middle of a generation, a step at a
time in turn with the others, as in a round: drafting finds the processor's caches full of
the target's weights, and verifying without some of them, so that each of both takes longer
than by itself over and over. A step starts from the same state every time, yet depends on
the step before and every result is used, so that XLA can neither hoist nor drop work. What
the host's call costs is taken off; medians, in milliseconds.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspec import decode, scoring, theory, timing
from jspec import sampling as smp
from jspec.drafters.draft import Draft
from jspec.models import Model
from jspec.requests import Request, prepare
from jspec.state import State, context
from jspec.timing import Loop, copy_bandwidth
from jspec.types import (
    Array,
    Block,
    Drafter,
    DraftShape,
    Feedback,
    Rule,
    Target,
    chain,
)

__all__ = [
    "Terms",
    "Width",
    "copy_bandwidth",
    "terms",
    "verify_curve",
    "width_shares",
]

# Leaves of a drafter's state up to ``timing.SMALL`` (lengths, counters, features) are set
# back after every step. Larger ones (caches, tables) are carried on: setting them back
# would copy them, which no real round does, and beyond the lengths they mean nothing.
_SMALL = timing.SMALL
_MANY = 16  # steps of a drafter in one call, for those too short to be timed alone
_LEAST = 0.02  # seconds of a timed call of ``verify_curve``
_WARM_ROUNDS = 2  # rounds decoded before measuring


class Width(NamedTuple):
    """Milliseconds of ``Terms.verify`` and ``round`` when the first ``nodes`` nodes live."""

    nodes: int
    verify: float
    round: float


@dataclasses.dataclass(frozen=True)
class Terms:
    """Milliseconds of the parts of a round, all of one batch.

    Attributes:
      ar: a whole round of plain decoding: one target forward of one row a sequence,
        law, draw, cache, the loop's bookkeeping.
      draft: ``drafter.propose`` and ``drafter.update``.
      verify: ``target.score`` on a block of N live nodes, the law at every node, the
        accept rule, and ``cache.append``.
      round: the whole ``decode.decode_round``, all N nodes live.
      widths: the same for every width that the drafter's blocks are scored in
        (``DraftShape.widths``, then N).
    """

    ar: float
    draft: float
    verify: float
    round: float
    widths: tuple[Width, ...]

    def at(self, shares: Sequence[float]) -> Terms:
        """The mean over rounds of which ``shares`` were scored in each of ``widths``."""
        every = list(zip(shares, self.widths, strict=True))
        return dataclasses.replace(
            self,
            verify=sum(share * width.verify for share, width in every),
            round=sum(share * width.round for share, width in every),
        )

    @property
    def overhead(self) -> float:
        """``round / (draft + verify)``: 1 when a round costs no more than its terms."""
        return self.round / (self.draft + self.verify)

    def speedup(self, tau: float) -> float:
        """What these terms predict over plain decoding, bonus counted in ``tau``."""
        return theory.speedup(self.ar, self.draft, self.verify, tau)


def width_shares(
    shape: DraftShape, lengths: Sequence[int], batch: int = 1
) -> tuple[float, ...]:
    """Which shares of the rounds were scored in each width of a drafter's blocks.

    A batch is scored in the width that its largest block needs; rows are taken to draft
    independently of one another.

    Args:
      shape: of the drafter.
      lengths: ``Stats.lengths``. Of a tree they only tell which rounds had the root alone.
      batch: sequences of a batch.
    """

    def needed(drafts: int) -> int:
        if drafts and shape.nodes > shape.depth + 1:
            return shape.nodes
        return drafts + 1

    def fitting(width: int) -> float:
        rounds = sum(n for drafts, n in enumerate(lengths) if needed(drafts) <= width)
        return (rounds / sum(lengths)) ** batch

    fit = [0.0, *map(fitting, shape.widths), 1.0]
    return tuple(b - a for a, b in itertools.pairwise(fit))


def terms(
    model: Model,
    draft: Draft | Drafter | None,
    prompts: Sequence,
    *,
    rule: Rule | None = None,
    slots: int | None = None,
    runs: int = 16,
    **options: Any,
) -> Terms:
    """Measures one batch of prompts with one drafter.

    Args:
      model, draft, prompts, rule, slots: as in ``jspec.generate``.
      runs: steps of each kind; the median counts.
      **options: sampling options.

    Raises:
      ValueError: bad input, as in ``jspec.generate``.
    """

    def ready(draft, rule) -> tuple[Request, State]:
        request = prepare(
            model,
            draft,
            prompts,
            max_new_tokens=1 << 20,  # to the end of the slots
            rule=rule,
            slots=slots,
            eos_ids=(),
            **options,
        )
        state = request.run(request.prefill(), jnp.int32(_WARM_ROUNDS))
        return request, state

    slots = slots or _enough(model, draft, prompts)
    plain, plain_state = ready(None, None)
    ours, state = ready(draft, rule)
    params, shape = ours.params, ours.draft.drafter.shape
    told = _feedback(ours, state)
    static = _static(ours)
    ar = Loop(_round_step, _static(plain), plain_state)
    own = jax.tree.map(jnp.copy, told.block)
    draft_ = Loop(_draft_step, static, (ready(draft, rule)[1], own))
    draft_.run((params, told), 1)
    block = jax.tree.map(jnp.copy, draft_.carry[1])  # a real one from here on
    verify_ = Loop(_verify_step, static, ready(draft, rule)[1])
    round_ = Loop(_round_step, static, state)
    loops = {
        "ar": functools.partial(ar.run, (plain.params, jnp.int32(1))),
        "draft": functools.partial(draft_.run, (params, told)),
        "drafts": lambda count: draft_.run((params, told), count * _MANY),
    }
    sizes = (*shape.widths, shape.nodes)
    for n in map(jnp.int32, sizes):
        loops[f"verify {n}"] = functools.partial(verify_.run, (params, block, n))
        loops[f"round {n}"] = functools.partial(round_.run, (params, n))
    took = timing.in_turn(loops, 1, runs)
    widths = tuple(Width(n, took[f"verify {n}"], took[f"round {n}"]) for n in sizes)
    full, drafting = widths[-1], max(took["draft"], took["drafts"] / _MANY)
    return Terms(took["ar"], drafting, full.verify, full.round, widths)


def verify_curve(
    model: Model,
    widths: Sequence[int],
    *,
    context: int = 256,
    batch: int = 1,
    repetitions: int = 8,
    runs: int = 5,
) -> dict[int, float]:
    """Milliseconds of ``target.score`` on a chain of N nodes, for every N in ``widths``.

    The best token of every node is read, as the greedy rule does; nothing is appended.

    Args:
      model: the target.  widths: block widths N, root included.
      context: tokens in the cache of every sequence, whose slots are the least multiple
        of 64 that holds them and the widest block.
      batch: sequences.
      repetitions: steps in one compiled loop, more of a tiny model.
      runs: loops timed; the median counts.
    """
    slots = -(-(context + max(widths)) // 64) * 64
    cache = model.target.init_cache(batch, slots, model.cache_dtype)
    cache = cache.rewind(jnp.full(batch, context, jnp.int32))

    def loop(width: int) -> Callable[[int], None]:
        block = chain(jnp.ones((batch, width), jnp.int32))
        score = Loop(_score_step, (model.target,), jax.tree.map(jnp.copy, cache))
        return functools.partial(score.run, (model.params, block))

    loops = {n: loop(n) for n in widths}
    return timing.in_turn(loops, repetitions, runs, _LEAST)


# --- steps ----------------------------------------------------------------------------


def _static(request: Request) -> tuple[Target, Drafter, Rule]:
    return request.model.target, request.draft.drafter, request.rule


def _round_step(target: Target, drafter: Drafter, rule: Rule, given, state, zero):
    params, width = given

    def propose(*arguments):
        block, draft = drafter.propose(*arguments)
        return _first(block, width), draft

    new, info = decode.decode_round(
        params,
        _shift(state, zero),
        target=target,
        drafter=drafter._replace(propose=propose),
        rule=rule,
    )
    cache = new.cache.rewind(state.cache.length)
    draft, small = _set_back(new.draft, state.draft)
    kept = dataclasses.replace(state, cache=cache, draft=draft)
    new = dataclasses.replace(new, cache=None, draft=None, sampling=None)
    return kept, (info, small, new)


def _verify_step(target: Target, drafter: Drafter, rule: Rule, given, state, zero):
    params, block, width = given
    block = dataclasses.replace(_first(block, width), token=block.token + zero)
    verdict, out = _judge(target, drafter, rule, params, state, block)
    cache = state.cache.append(out.kv, verdict.path, verdict.n_accept + 1)
    cache = cache.rewind(state.cache.length)
    return dataclasses.replace(state, cache=cache), verdict


def _draft_step(target: Target, drafter: Drafter, rule: Rule, given, carry, zero):
    del target, rule
    (params, told), (state, _) = given, carry
    block, draft = _propose(drafter, params, _shift(state, zero))
    told = timing.depending(told, zero)
    told = dataclasses.replace(told, block=block, sampling=state.sampling)
    draft, small = _set_back(drafter.update(params.draft, draft, told), state.draft)
    # The block is carried: it has to be written, but not read, as in a real round.
    return (dataclasses.replace(state, draft=draft), block), (block.token, small)


def _score_step(target: Target, given, cache, zero):
    params, block = given
    block = dataclasses.replace(block, token=block.token + zero)
    return cache, smp.argmax(target.score(params, cache, block).logits)


def _first(block: Block, width: Array) -> Block:
    """The block with exactly its first ``width`` nodes live."""
    live = jnp.arange(block.live.shape[1]) < width
    return dataclasses.replace(block, live=jnp.broadcast_to(live, block.live.shape))


def _feedback(request: Request, state: State) -> Feedback:
    """Zeros in the shape of what a drafter is told after a round that kept no draft."""
    target, drafter, rule = _static(request)

    def ask(params, state):
        block, _ = _propose(drafter, params, state)
        verdict, out = _judge(target, drafter, rule, params, state, block)
        return Feedback(block, verdict, out.logits, out.features)

    shapes = jax.eval_shape(ask, request.params, state)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def _propose(drafter: Drafter, params, state: State):
    key, _ = smp.row_keys(state.sampling, state.round)
    return drafter.propose(params.draft, state.draft, key, context(state))


def _judge(target: Target, drafter: Drafter, rule: Rule, params, state: State, block):
    """Score, law, noise and rule of a round: verdict and scores."""
    _, key = smp.row_keys(state.sampling, state.round)
    out, verdict, _ = scoring.judged(
        params, state, block, key, target=target, drafter=drafter, rule=rule
    )
    return verdict, out


def _shift(state: State, zero: Array) -> State:
    """The state, its lengths and what is set back of the drafter's depending on a step."""
    cache = state.cache.rewind(state.cache.length + zero)
    draft = timing.depending(state.draft, zero, _SMALL)
    length = state.length + zero
    return dataclasses.replace(state, cache=cache, draft=draft, length=length)


def _set_back(new: Any, old: Any) -> tuple[Any, list[Array]]:
    """The drafter's state to go on with, and the small leaves that it replaces."""
    small = [leaf for leaf in jax.tree.leaves(new) if leaf.size <= _SMALL]
    kept = jax.tree.map(lambda a, b: b if a.size <= _SMALL else a, new, old)
    return kept, small


def _enough(model: Model, draft: Draft | Drafter | None, prompts: Sequence) -> int:
    """Slots for the prompts, the first rounds and one more."""
    short = prepare(model, draft, prompts, max_new_tokens=1)
    depth = short.draft.drafter.shape.depth
    needed = max(map(len, short.prompts)) + (_WARM_ROUNDS + 1) * (depth + 1)
    slots = -(-needed // 64) * 64
    return min(slots, model.config.max_position)
