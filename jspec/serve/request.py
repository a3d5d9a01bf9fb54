"""A request from its arrival to its end, as the host sees it."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jspec import requests, stats
from jspec.state import State
from jspec.text import Detokenizer


class Full(RuntimeError):
    """The queue of an engine is full."""


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A checked request of one row."""

    row: requests.Request

    @property
    def prompt(self) -> list[int]:
        return self.row.prompts[0]

    @property
    def cold(self) -> bool:
        """Is its temperature 0?"""
        return not np.any(np.asarray(self.row.options.temperature))


class Piece(NamedTuple):
    """What a request gained in a round.

    Attributes:
      tokens: new ids.  text: new text that is decided.
      log_prob: of the new tokens, or None.
      finish_reason: None while it runs; ``"eos"``, ``"length"``, ``"stop"``,
        ``"cancelled"``, ``"deadline"`` or ``"error"``.
    """

    tokens: list[int]
    text: str
    log_prob: list[float] | None
    finish_reason: str | None


@dataclasses.dataclass(frozen=True)
class Result:
    """A request that has ended; fields as of ``Piece``, and statistics of its rounds.

    ``shared`` tokens of the prompt were known from another one. ``waited``,
    ``first_token`` and ``seconds`` are times since it was submitted.
    """

    prompt_tokens: int
    shared: int
    tokens: list[int]
    text: str
    log_prob: list[float] | None
    finish_reason: str
    stats: stats.Stats
    waited: float
    first_token: float | None
    seconds: float


class Ticket:
    """A submitted request. The engine's thread adds to it; any thread may cancel it."""

    def __init__(
        self,
        prepared: Prepared,
        speculate: bool = True,
        seconds: float | None = None,
        sink: Callable[[Piece], None] | None = None,
        prefilled: State | None = None,
    ):
        if seconds is not None and not seconds > 0:
            raise ValueError(f"seconds is {seconds}; a deadline must lie ahead")
        self.prepared, self.speculate, self.prefilled = prepared, speculate, prefilled
        self.tokens: list[int] = []
        self.log_prob: list[float] = []
        self.shared = 0
        self.finish_reason: str | None = None
        self.error: BaseException | None = None
        self._sink = sink
        self._emitted: list[int] = []
        self._proposed: list[int] = []
        self._detok = Detokenizer(prepared.row.model.tokenizer, prepared.row.stop)
        self._submitted = time.monotonic()
        self._deadline = None if seconds is None else self._submitted + seconds
        self._admitted = self._first = self._ended = None
        self._cancelled = False
        self._done = threading.Event()

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None

    def cancel(self) -> None:
        """Asks the engine to end the request; its slot is free before the next round."""
        self._cancelled = True

    def wait(self, timeout: float | None = None) -> Result:
        """The result, once there is one.

        Raises:
          TimeoutError: there was none in time.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"the request has not ended after {timeout} seconds")
        return self.result()

    def result(self) -> Result:
        """What came of it.

        Raises:
          RuntimeError: it has not ended.  Whatever the engine failed with.
        """
        if self.error is not None:
            raise self.error
        if self.finish_reason is None or self._ended is None:
            raise RuntimeError("the request has not ended yet")
        emitted, proposed = np.array(self._emitted, int), np.array(self._proposed, int)
        start = self._submitted
        return Result(
            prompt_tokens=len(self.prepared.prompt),
            shared=self.shared,
            tokens=self.tokens,
            text=self._detok.text,
            log_prob=self.log_prob if self._has_log_prob else None,
            finish_reason=self.finish_reason,
            stats=stats.collect(
                emitted[None],
                proposed[None],
                self.prepared.row.draft.drafter.shape.depth,
                self._ended - (self._admitted or self._ended),
            ),
            waited=(self._admitted or self._ended) - start,
            first_token=None if self._first is None else self._first - start,
            seconds=self._ended - start,
        )

    # --- the engine's thread ------------------------------------------------------

    _has_log_prob = False

    def admitted(self) -> None:
        self._admitted = time.monotonic()
        self.prefilled = None  # it lives in a slot now

    def expire(self, now: float) -> None:
        """Ends a request that was cancelled or is out of time."""
        if self.ended:
            return
        if self._cancelled:
            self.end("cancelled")
        elif self._deadline is not None and now >= self._deadline:
            self.end("deadline")

    def add(self, tokens: Any, proposed: int, log_prob: Any) -> None:
        """The tokens of a round, cut at a stop string, which ends the request."""
        new, text, stopped = [int(t) for t in tokens], "", False
        if not new:
            return
        if self._first is None:
            self._first = time.monotonic()
        if self._detok.tokenizer is not None:
            text, kept = self._detok.feed(new)
            if kept is not None:
                new, stopped = new[: kept - len(self.tokens)], True
        self.tokens += new
        self._emitted.append(len(new))
        self._proposed.append(proposed)
        if log_prob is not None:
            self._has_log_prob = True
            self.log_prob += [float(x) for x in log_prob[: len(new)]]
        given = None if log_prob is None else self.log_prob[-len(new) :]
        if stopped:
            return self.end("stop", piece=Piece(new, text, given, "stop"))
        self._tell(Piece(new, text, given, None))

    def end(
        self,
        reason: str,
        error: BaseException | None = None,
        piece: Piece | None = None,
    ) -> None:
        """Ends the request, once."""
        if self.ended:
            return
        rest = ""
        if piece is None and self._detok.tokenizer is not None:
            rest = self._detok.flush()
        self.error, self.finish_reason = error, reason
        self._ended = time.monotonic()
        self._done.set()
        self._tell(piece or Piece([], rest, None, reason))

    def _tell(self, piece: Piece) -> None:
        if self._sink is not None:
            self._sink(piece)
