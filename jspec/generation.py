"""Prompts in, text out: the host side of decoding.

All host work happens before the first round, after the last one, and, only where
somebody streams or asks for stop strings, between bursts of rounds.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec import stats
from jspec.drafters.draft import Draft
from jspec.models import Model
from jspec.requests import Request, prepare
from jspec.state import EOS, FAULT, LENGTH, RUNNING, STOP, State, truncate
from jspec.text import Detokenizer, Prompt
from jspec.types import Drafter

REASONS = {EOS: "eos", LENGTH: "length", STOP: "stop"}
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
