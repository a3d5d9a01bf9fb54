"""Prompts in, text out: the host side of decoding.

All host work happens before the first round, after the last one, and, only where
somebody streams or asks for stop strings, between bursts of rounds.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from jspec import decode, sampling, stats, verify
from jspec.drafters.draft import Draft
from jspec.models import Model
from jspec.prefill import chunk_for
from jspec.state import EOS, FAULT, LENGTH, RUNNING, STOP, Params, State, truncate
from jspec.text import Detokenizer, Prompt, encode
from jspec.types import Drafter, Rule

REASONS = {EOS: "eos", LENGTH: "length", STOP: "stop"}
# Slots come in multiples of this, so that prompts of similar length share a program.
SLOTS = 64
# Rounds between two looks of the host, where it must look at all.
BURST = 8


@dataclasses.dataclass(frozen=True)
class Output:
    """What ``generate`` returns; every list has one entry a prompt.

    Attributes:
      tokens: new token ids, an end-of-sequence id included.
      text: the new text without special tokens, up to a stop string (empty without a
        tokenizer).
      finish_reason: ``"eos"``, ``"length"`` or ``"stop"``.
      log_prob: log-probability of each new token under the plain model, or None.
      stats: see ``jspec.stats.Stats``.
    """

    tokens: list[list[int]]
    text: list[str]
    finish_reason: list[str]
    log_prob: list[list[float]] | None
    stats: stats.Stats


class Delta(NamedTuple):
    """New tokens and text of one row; ``finish_reason`` is None while it runs."""

    row: int
    tokens: list[int]
    text: str
    finish_reason: str | None


def generate(
    model: Model,
    drafter: Drafter | Draft | None = None,
    prompts: Prompt | Sequence[Prompt] = (),
    **arguments,
) -> Output:
    """Generates a continuation of every prompt, as one batch.

    Args:
      model: the target, from ``jspec.load``.
      drafter: who drafts; None is plain decoding.
      prompts: strings (the chat template is applied when the tokenizer has one) or
        lists of token ids; or one of them.
      **arguments: see ``prepare``: ``max_new_tokens``, ``temperature``, ``seed``, ...

    Raises:
      ValueError: bad input, before anything is compiled; the message names it.
      FloatingPointError: a NaN or an infinity in the target's logits.
    """
    run = Stream(prepare(model, drafter, prompts, **arguments), rounds=None)
    for _ in run:
        pass
    return run.output


def stream(
    model: Model,
    drafter: Drafter | Draft | None = None,
    prompts: Prompt | Sequence[Prompt] = (),
    *,
    rounds: int = 1,
    **arguments,
) -> Stream:
    """``generate``, yielding a ``Delta`` a row after every ``rounds`` rounds.

    The joined deltas equal the output of ``generate``, which is in ``.output`` once the
    iterator is exhausted. Arguments and errors are those of ``generate``.
    """
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; a stream needs at least 1 between looks")
    return Stream(prepare(model, drafter, prompts, **arguments), rounds)


def autoregress(
    model: Model, prompts: Prompt | Sequence[Prompt], **arguments
) -> Output:
    """Plain decoding: ``generate`` with the empty drafter."""
    return generate(model, None, prompts, **arguments)


@dataclasses.dataclass(frozen=True)
class Request:
    """A validated batch: everything ``prefill`` and ``run`` are called with."""

    model: Model
    draft: Draft
    rule: Rule
    prompts: list[list[int]]
    options: sampling.Sampling
    stop: tuple[str, ...]
    limit: np.ndarray
    slots: int
    log_prob: bool

    @property
    def params(self) -> Params:
        return Params(self.model.params, self.draft.params)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arrays that ``decode.prefill`` is given."""
        tokens = np.zeros((len(self.prompts), self.slots), np.int32)
        for row, ids in zip(tokens, self.prompts, strict=True):
            row[: len(ids)] = ids
        length = np.asarray([len(p) for p in self.prompts], np.int32)
        limit = np.asarray(self.limit, np.int32)
        return self.params, self.options, tokens, length, limit

    def prefill(self) -> State:
        return decode.prefill(
            *self.arguments,
            target=self.model.target,
            drafter=self.draft.drafter,
            slots=self.slots,
            chunk=chunk_for(max(map(len, self.prompts))),
            log_prob=self.log_prob,
            dtype=self.model.dtype,
        )

    def run(self, state: State, rounds: jax.Array) -> State:
        return decode.run(
            self.params,
            state,
            rounds,
            target=self.model.target,
            drafter=self.draft.drafter,
            rule=self.rule,
        )


def prepare(
    model: Model,
    drafter: Drafter | Draft | None = None,
    prompts: Prompt | Sequence[Prompt] = (),
    *,
    max_new_tokens: int = 128,
    rule: Rule | None = None,
    stop: str | Sequence[str] = (),
    chat: bool | None = None,
    eos_ids: Sequence[int] | None = None,
    log_prob: bool = False,
    slots: int | None = None,
    **options,
) -> Request:
    """Validates a batch of requests; nothing is compiled or run.

    Args:
      model, drafter, prompts: see ``generate``.
      max_new_tokens: most tokens a row emits.
      rule: a rule of ``jspec.verify``; by default the best exact one for the drafter's
        blocks and the temperature.
      stop: the text ends before the first of these strings.
      chat: True or False to force or forbid the chat template.
      eos_ids: token ids that end a row; by default the model's own.
      log_prob: return log-probabilities of the new tokens under the plain model.
      slots: context capacity in tokens, prompt and new ones together; by default what
        the prompts and ``max_new_tokens`` need.
      **options: sampling options, each a value or a list with one value a prompt; see
        ``jspec.sampling.options``.

    Raises:
      ValueError: bad input; the message names the value and the remedy.
      TypeError: a drafter that is none.
    """
    config = model.target.config
    draft = as_draft(drafter)
    if draft.vocab_size not in (None, config.vocab_size):
        raise ValueError(
            f"{draft.name} was made for a target with {draft.vocab_size} tokens, but "
            f"{model.name} has {config.vocab_size}"
        )
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; need at least 1")
    ids = encode(model.tokenizer, _as_list(prompts), config.vocab_size, chat)
    eos = config.eos_ids if eos_ids is None else tuple(eos_ids)
    knobs = sampling.options(
        len(ids), vocab_size=config.vocab_size, eos_ids=eos, **options
    )
    depth = draft.drafter.shape.depth
    limit, slots = _budget([len(p) for p in ids], max_new_tokens, depth, slots, config)
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if stop and model.tokenizer is None:
        raise ValueError("stop strings need a tokenizer, and the model has none")
    if "" in stop:
        raise ValueError("a stop string is empty; it would stop every text at once")
    if rule is None:
        cold = not np.any(np.asarray(knobs.temperature))
        rule = verify.default_rule(draft.drafter.shape, cold)
    return Request(model, draft, rule, ids, knobs, stop, limit, slots, log_prob)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts from one prompt or several.

    Raises:
      ValueError: there is none.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not len(prompts):
        raise ValueError("no prompts; give at least one string or list of token ids")
    ids = [p for p in prompts if not isinstance(p, str) and np.ndim(p) == 0]
    if ids:  # one prompt of token ids
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[Prompt], prompts))


def as_draft(drafter: Drafter | Draft | None) -> Draft:
    """A drafter with its weights, from whatever stands for one.

    Raises:
      TypeError: nothing of that kind.
    """
    if drafter is None:
        return Draft(decode.no_drafts(), name="none")
    if isinstance(drafter, Draft):
        return drafter
    if isinstance(drafter, Drafter):
        return Draft(drafter)
    raise TypeError(
        f"drafter is a {type(drafter).__name__}; give None, a Drafter, or what "
        "load_drafter returns"
    )


def _budget(lengths: list[int], new: int, depth: int, slots: int | None, config):
    """Committed tokens at which each row ends, and the slots to allocate."""
    capacity = config.max_position if slots is None else slots
    if capacity > config.max_position:
        raise ValueError(
            f"slots is {slots}, but the model's context ends at {config.max_position}"
        )
    longest = max(lengths)
    if longest >= capacity:
        raise ValueError(
            f"prompt {lengths.index(longest)} has {longest} tokens, but the context "
            f"holds {capacity} including at least one new token; shorten the prompt or "
            "raise slots"
        )
    if depth >= capacity:
        raise ValueError(
            f"gamma is {depth}, but the context holds only {capacity} tokens"
        )
    limit = np.minimum(np.asarray(lengths) + new, capacity)
    # Slack for one block: the cache is written a whole path at a time.
    # Slots asked for are allocated whole, so that all calls with them share a program.
    needed = (int(limit.max()) if slots is None else slots) + depth + 1
    return limit, -(-needed // SLOTS) * SLOTS


class Stream:
    """Iterator over ``Delta``; ``output`` holds the whole once it is exhausted."""

    def __init__(self, request: Request, rounds: int | None):
        self._request = request
        self._rounds = rounds  # between two looks of the host; None: as few as needed
        self._output: Output | None = None

    @property
    def output(self) -> Output:
        """The finished generation.

        Raises:
          RuntimeError: if the stream has not been read to its end.
        """
        if self._output is None:
            raise RuntimeError("the stream has not ended yet; iterate over it first")
        return self._output

    def __iter__(self) -> Iterator[Delta]:
        request = self._request
        tokenizer = request.model.tokenizer
        start = time.perf_counter()
        state = jax.block_until_ready(request.prefill())
        prefill_seconds = time.perf_counter() - start
        detok = [Detokenizer(tokenizer, request.stop) for _ in request.prompts]
        given = [len(p) for p in request.prompts]
        seconds = 0.0
        rounds = jnp.int32(self._rounds or (BURST if request.stop else request.slots))
        while True:
            start = time.perf_counter()
            state = jax.block_until_ready(request.run(state, rounds))
            state, deltas = _look(state, request, detok, given)
            seconds += time.perf_counter() - start
            yield from deltas
            reason = np.asarray(state.reason)
            if not np.any(reason == RUNNING):
                break
        self._output = _output(state, request, detok, seconds, prefill_seconds)


def _look(state: State, request: Request, detok: list[Detokenizer], given: list[int]):
    """Reads the new tokens of every row; ends rows whose stop string is complete."""
    length, reason = np.array(state.length), np.array(state.reason)
    _raise_on_fault(reason, length)
    tokens = np.asarray(state.tokens)
    deltas, stopped = [], False
    for row, text in enumerate(detok):
        if length[row] == given[row]:
            continue
        new = tokens[row, given[row] : length[row]].tolist()
        piece = ""
        if text.tokenizer is not None:
            piece, kept = text.feed(new)
            if kept is not None:
                stopped = True
                reason[row] = STOP
                length[row] = len(request.prompts[row]) + kept
                new = new[: length[row] - given[row]]
            if reason[row] != RUNNING:
                piece += text.flush()
        given[row] = int(length[row])
        deltas.append(Delta(row, new, piece, REASONS.get(int(reason[row]))))
    if stopped:
        state = truncate(state, jnp.asarray(length), jnp.asarray(reason))
    return state, deltas


def _raise_on_fault(reason: np.ndarray, length: np.ndarray) -> None:
    rows = np.flatnonzero(reason == FAULT)
    if rows.size:
        row = int(rows[0])
        raise fault(int(length[row]), f" in row {row}")


def fault(length: int, where: str = "") -> FloatingPointError:
    """What is wrong with a row that ended by a FAULT after ``length`` tokens."""
    return FloatingPointError(
        f"the target's logits are not finite{where} after {length} tokens; check the "
        "weights, or use a wider dtype"
    )


def _output(state, request, detok, seconds, prefill_seconds) -> Output:
    length, tokens = np.asarray(state.length), np.asarray(state.tokens)
    spans = [(len(p), int(n)) for p, n in zip(request.prompts, length, strict=True)]

    def rows(array):
        array = np.asarray(array)
        return [array[row, a:b].tolist() for row, (a, b) in enumerate(spans)]

    return Output(
        tokens=rows(tokens),
        text=[d.text for d in detok],
        finish_reason=[REASONS[int(r)] for r in np.asarray(state.reason)],
        log_prob=None if state.log_prob is None else rows(state.log_prob),
        stats=stats.collect(
            np.asarray(state.emitted),
            np.asarray(state.proposed),
            request.draft.drafter.shape.depth,
            seconds,
            prefill_seconds,
        ),
    )
