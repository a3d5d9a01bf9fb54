"""The measured terms of ``L = (T_draft + T_verify) / tau`` on this device.

Every time is of the real functions on a state in the middle of a generation. One call
runs the same step ``repetitions`` times in one compiled loop, so the host's share is
spread thin; each step starts from the same state, yet depends on the step before and
every result is used, so that XLA can neither hoist nor drop work. What is to be compared
is timed in turn, run after run, and the median is taken. Milliseconds throughout.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jspec import decode, theory, tree, verify
from jspec import sampling as smp
from jspec.decode import State
from jspec.drafters.loading import Draft
from jspec.generation import Request, prepare
from jspec.models import Model
from jspec.types import Array, Block, Context, Drafter, Feedback, Rule, chain

# Leaves of a drafter's state up to this size (lengths, counters, features) are set back
# after every repetition. Larger ones (caches, tables) are carried on: setting them back
# would copy them, which no real round does, and beyond the lengths they mean nothing.
_SMALL = 1 << 14
_WARM_ROUNDS = 2  # rounds decoded before measuring


@dataclasses.dataclass(frozen=True)
class Terms:
    """Milliseconds of the parts of a round, all of one batch.

    Attributes:
      ar: a whole round of plain decoding: one target forward of one row a sequence,
        law, draw, cache, the loop's bookkeeping.
      draft: ``drafter.propose`` and ``drafter.update``.
      verify: ``target.score`` on a block of N nodes, the law at every node, the accept
        rule, and ``cache.append``.
      round: the whole ``decode.decode_round``.
    """

    ar: float
    draft: float
    verify: float
    round: float

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
    feedback = _feedback(ours, state)
    steps = {
        "ar": _loop(_round_step(plain), plain_state),
        "draft": _loop(_draft_step(ours, feedback), ready(draft, rule)[1]),
        "verify": _loop(_verify_step(ours, feedback.block), ready(draft, rule)[1]),
        "round": _loop(_round_step(ours), state),
    }
    return Terms(**in_turn(steps, repetitions, runs))


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

        return _loop((score, model.params), cache, donate=False)

    return in_turn({n: step(n) for n in widths}, repetitions, runs)


def copy_bandwidth(megabytes: int = 256, runs: int = 7) -> float:
    """Memory bandwidth in GB/s (1e9 bytes): the fastest of ``runs`` reads of an array.

    A product of a matrix with a vector, spread by XLA over all cores: what reads memory
    fastest, and what decoding does.
    """
    rows = megabytes * 2**20 // (4 * 4096)
    matrix, vector = jnp.ones((rows, 4096)), jnp.ones(4096)
    read = jax.jit(lambda m, v: m @ v)
    jax.block_until_ready(read(matrix, vector))
    best = min(_seconds(read, matrix, vector) for _ in range(runs))
    return matrix.nbytes / best / 1e9


# --- loops ----------------------------------------------------------------------------

# (params, carry, zero) -> (carry, results). ``zero`` is 0 in a way XLA cannot know.
Step = Callable[[Any, Any, Array], tuple[Any, Any]]


def in_turn(
    loops: Mapping[Any, Callable[[int], None]], repetitions: int, runs: int
) -> dict[Any, float]:
    """Median milliseconds of one step of every loop, the loops taking turns.

    Args:
      loops: name to a function that runs so many steps and waits for them.
      repetitions: steps a call.  runs: timed calls of each loop.

    Raises:
      ValueError: unless both are at least 1.
    """
    if repetitions < 1 or runs < 1:
        raise ValueError(f"repetitions {repetitions} and runs {runs} must be >= 1")
    for loop in loops.values():
        loop(1)  # compiles
    times: dict[Any, list[float]] = {name: [] for name in loops}
    for _ in range(runs):
        for name, loop in loops.items():
            times[name].append(_seconds(loop, repetitions))
    return {n: 1e3 * statistics.median(t) / repetitions for n, t in times.items()}


def _seconds(function, *arguments) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - start


def _loop(step: tuple[Step, Any], carry: Any, donate: bool = True) -> Callable:
    """A function of the number of steps that runs them in one program."""
    function, params = step

    def many(params, carry, count):
        def body(_, state):
            carry, zero = state
            carry, results = function(params, carry, zero)
            return carry, _zero(results)

        return lax.fori_loop(0, count, body, (carry, jnp.int32(0)))

    program = jax.jit(many, donate_argnums=(1,) if donate else ())
    held = [carry]

    def run(count: int) -> None:
        result, _ = jax.block_until_ready(program(params, held[0], jnp.int32(count)))
        held[0] = result if donate else held[0]

    return run


def _zero(results: Any) -> Array:
    """0 that depends on every number of the small leaves of ``results``."""
    total = jnp.float32(0)
    for leaf in jax.tree.leaves(results):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        total += jnp.sum(leaf.astype(jnp.float32))
    return (total == jnp.float32(1.2345e33)).astype(jnp.int32)


# --- steps ----------------------------------------------------------------------------


def _round_step(request: Request) -> tuple[Step, Any]:
    def step(params, state: State, zero):
        new, info = decode.decode_round(
            params,
            _shift(state, zero),
            target=request.model.target,
            drafter=request.draft.drafter,
            rule=request.rule,
        )
        cache = new.cache.rewind(state.cache.length)
        draft, small = _set_back(new.draft, state.draft)
        results = info, small, new.replace(cache=None, draft=None, sampling=None)
        return state.replace(cache=cache, draft=draft), results

    return step, request.params


def _verify_step(request: Request, block: Block) -> tuple[Step, Any]:
    def step(given, state: State, zero):
        params, block = given
        moved = block.replace(token=block.token + zero)
        verdict, out = _judge(params, state, moved, request)
        cache = state.cache.append(out.kv, verdict.path, verdict.n_accept + 1)
        return state.replace(cache=cache.rewind(state.cache.length)), verdict

    return step, (request.params, block)


def _draft_step(request: Request, feedback: Feedback) -> tuple[Step, Any]:
    drafter = request.draft.drafter

    def step(given, state: State, zero):
        params, feedback = given
        block, draft = _propose(params, _shift(state, zero), drafter)
        told = feedback.replace(block=block, sampling=state.sampling)
        draft, small = _set_back(drafter.update(params.draft, draft, told), state.draft)
        return state.replace(draft=draft), (block, small)

    return step, (request.params, feedback)


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
    out = request.model.target.score(params.target, state.cache, block, taps=shape.taps)
    law = smp.law(
        out.logits, state.sampling, state.tokens, state.length, state.start, block, mask
    )
    _, key = smp.row_keys(state.sampling, state.round)
    nodes, vocab = law.p.shape[1:]
    noise = smp.noise(key, state.sampling, state.length, nodes, shape.depth + 1, vocab)
    verdict = verify.batched(request.rule)(noise, block, law)
    return verdict.replace(path=verdict.path[:, : shape.depth + 1]), out


def _shift(state: State, zero: Array) -> State:
    """The state, its lengths depending on the repetition before."""
    cache = state.cache.rewind(state.cache.length + zero)
    return state.replace(cache=cache, length=state.length + zero)


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
