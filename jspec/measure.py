"""The measured terms of ``L = (T_draft + T_verify) / tau`` on this device.

Every time is of the real functions on a state in the middle of a generation. One call
runs the same step ``repetitions`` times in one compiled loop, so the host's share is
spread thin; each step starts from the same state, yet depends on the step before and
every result is used, so that XLA can neither hoist nor drop work. What is to be compared
is timed in turn, run after run, and the median is taken. Milliseconds throughout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jspec import decode, theory, timing, tree, verify
from jspec import sampling as smp
from jspec.decode import State
from jspec.drafters.loading import Draft
from jspec.generation import Request, prepare
from jspec.models import Model
from jspec.timing import Step, copy_bandwidth
from jspec.types import Array, Block, Context, Drafter, Feedback, Rule, chain

__all__ = ["Terms", "copy_bandwidth", "terms", "verify_curve"]

# Leaves of a drafter's state up to this size (lengths, counters, features) are set back
# after every repetition. Larger ones (caches, tables) are carried on: setting them back
# would copy them, which no real round does, and beyond the lengths they mean nothing.
_SMALL = 1 << 14
_WARM_ROUNDS = 2  # rounds decoded before measuring


@dataclasses.dataclass(frozen=True)
class Terms:
    """Milliseconds of the parts of a round, all of one batch.

    A drafter with ``shape.widths`` has cheap rounds, in which it found nothing; the two
    ``idle`` fields are theirs, and equal the full ones for every other drafter.

    Attributes:
      ar: a whole round of plain decoding: one target forward of one row a sequence,
        law, draw, cache, the loop's bookkeeping.
      draft: ``drafter.propose`` and ``drafter.update``.
      verify: ``target.score`` on a block of N live nodes, the law at every node, the
        accept rule, and ``cache.append``.
      round: the whole ``decode.decode_round``, all N nodes live.
      idle_verify, idle_round: the same when the root alone is live.
    """

    ar: float
    draft: float
    verify: float
    round: float
    idle_verify: float
    idle_round: float

    def at(self, drafted: float) -> Terms:
        """The mean over rounds of which the share ``drafted`` had a draft."""
        verify, round_ = (
            drafted * full + (1 - drafted) * idle
            for full, idle in (
                (self.verify, self.idle_verify),
                (self.round, self.idle_round),
            )
        )
        return dataclasses.replace(self, verify=verify, round=round_)

    @property
    def overhead(self) -> float:
        """``round / (draft + verify)``: 1 when a round costs no more than its terms."""
        return self.round / (self.draft + self.verify)

    def speedup(self, tau: float) -> float:
        """What these terms predict over plain decoding, bonus counted in ``tau``."""
        return theory.speedup(self.ar, self.draft, self.verify, tau)


def terms(
    model: Model,
    draft: Draft | Drafter | None,
    prompts: Sequence,
    *,
    rule: Rule | None = None,
    slots: int | None = None,
    repetitions: int = 8,
    runs: int = 5,
    **options: Any,
) -> Terms:
    """Measures one batch of prompts with one drafter.

    Args:
      model, draft, prompts, rule, slots: as in ``jspec.generate``.
      repetitions: steps in one compiled loop.  runs: loops timed; the median counts.
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
    params, feedback = ours.params, _feedback(ours, state)
    nodes = jnp.int32(ours.draft.drafter.shape.nodes)
    widths = {"": nodes, "idle_": jnp.int32(1)}
    verify = {w + "verify": (params, feedback.block, n) for w, n in widths.items()}
    round_ = {w + "round": (params, n) for w, n in widths.items()}
    loops = {
        **timing.loops(_round_step(plain), {"ar": (plain.params, nodes)}, plain_state),
        **timing.loops(
            _draft_step(ours), {"draft": (params, feedback)}, ready(draft, rule)[1]
        ),
        **timing.loops(_verify_step(ours), verify, ready(draft, rule)[1]),
        **timing.loops(_round_step(ours), round_, state),
    }
    return Terms(**timing.in_turn(loops, repetitions, runs))


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
      repetitions, runs: as in ``terms``.
    """
    slots = -(-(context + max(widths)) // 64) * 64
    cache = model.target.init_cache(batch, slots, model.dtype)
    cache = cache.rewind(jnp.full(batch, context, jnp.int32))

    def step(width: int):
        tokens = jnp.ones((batch, width), jnp.int32)

        def score(params, carry, zero):
            out = model.target.score(params, carry, chain(tokens + zero))
            return carry, smp.argmax(out.logits)

        return timing.loops(score, {width: model.params}, cache, donate=False)

    loops = {n: loop for width in widths for n, loop in step(width).items()}
    return timing.in_turn(loops, repetitions, runs)


# --- steps ----------------------------------------------------------------------------


def _round_step(request: Request) -> Step:
    drafter = request.draft.drafter

    def step(given, state: State, zero):
        params, width = given

        def propose(*arguments):
            block, draft = drafter.propose(*arguments)
            return _first(block, width), draft

        new, info = decode.decode_round(
            params,
            _shift(state, zero),
            target=request.model.target,
            drafter=drafter._replace(propose=propose),
            rule=request.rule,
        )
        cache = new.cache.rewind(state.cache.length)
        draft, small = _set_back(new.draft, state.draft)
        kept = dataclasses.replace(state, cache=cache, draft=draft)
        new = dataclasses.replace(new, cache=None, draft=None, sampling=None)
        return kept, (info, small, new)

    return step


def _verify_step(request: Request) -> Step:
    def step(given, state: State, zero):
        params, block, width = given
        moved = dataclasses.replace(_first(block, width), token=block.token + zero)
        verdict, out = _judge(params, state, moved, request)
        cache = state.cache.append(out.kv, verdict.path, verdict.n_accept + 1)
        cache = cache.rewind(state.cache.length)
        return dataclasses.replace(state, cache=cache), verdict

    return step


def _draft_step(request: Request) -> Step:
    drafter = request.draft.drafter

    def step(given, state: State, zero):
        params, feedback = given
        block, draft = _propose(params, _shift(state, zero), drafter)
        told = dataclasses.replace(feedback, block=block, sampling=state.sampling)
        draft, small = _set_back(drafter.update(params.draft, draft, told), state.draft)
        return dataclasses.replace(state, draft=draft), (block, small)

    return step


def _first(block: Block, width: Array) -> Block:
    """The block with exactly its first ``width`` nodes live."""
    live = jnp.arange(block.live.shape[1]) < width
    return dataclasses.replace(block, live=jnp.broadcast_to(live, block.live.shape))


def _feedback(request: Request, state: State) -> Feedback:
    """What the next round of ``state`` will tell the drafter, its block included."""

    def ask(params, state):
        block, _ = _propose(params, state, request.draft.drafter)
        verdict, out = _judge(params, state, block, request)
        return Feedback(block, verdict, out.logits, out.features)

    return jax.jit(ask)(request.params, state)


def _propose(params, state: State, drafter: Drafter):
    key, _ = smp.row_keys(state.sampling, state.round)
    context = Context(state.tokens, state.length, state.sampling)
    return drafter.propose(params.draft, state.draft, key, context)


def _judge(params, state: State, block: Block, request: Request):
    """Score, law, noise and rule of a round; see ``decode.decode_round``."""
    shape, mask = request.draft.drafter.shape, tree.ancestors(block.parent)
    model = request.model.target
    out = decode.score_live(model, params.target, state.cache, block, shape)
    law = smp.law(
        out.logits, state.sampling, state.tokens, state.length, state.start, block, mask
    )
    _, key = smp.row_keys(state.sampling, state.round)
    nodes, vocab = law.p.shape[1:]
    noise = smp.noise(key, state.sampling, state.length, nodes, shape.depth + 1, vocab)
    verdict = verify.batched(request.rule)(noise, block, law)
    path = verdict.path[:, : shape.depth + 1]
    return dataclasses.replace(verdict, path=path), out


def _shift(state: State, zero: Array) -> State:
    """The state, its lengths depending on the repetition before."""
    cache = state.cache.rewind(state.cache.length + zero)
    return dataclasses.replace(state, cache=cache, length=state.length + zero)


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
