"""The engine: a thin host loop around slots on the device.

Requests wait in a bounded queue, are prefilled one by one into free slots, and take part
in every round until they end. Between rounds the host admits, streams and retires. It
reads a round while the device already runs the next one, so its work costs nothing as
long as it takes less than a round; a request that the host ends (a stop string, a cancel,
a deadline) may therefore run one round more than it needed, which nobody sees.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jspec import checks, generation, verify
from jspec.drafters.draft import Draft
from jspec.models import Model
from jspec.serve import prefixes, slots, switch
from jspec.serve.adaptive import Cost, Governor
from jspec.serve.request import Prepared, Result, Ticket
from jspec.serve.waiting import Waiting
from jspec.serve.warmup import Programs, Shape, warm_up
from jspec.state import FAULT, RUNNING, State
from jspec.text import Prompt
from jspec.types import Drafter, Rule

SERVED = "this engine is being served already; stop that first, or make another engine"


class _Flight(NamedTuple):
    """A round that was dispatched, and whose rows they were.

    ``alone``: did nothing but the round before precede it on the device?
    """

    look: slots.Look
    owners: list[tuple[int, Ticket]]
    drafted: bool
    resumed: bool
    size: int
    alone: bool


class Engine:
    """Continuous batching with speculation.

    Not thread-safe but for ``submit`` and tickets: one thread calls ``step`` (or
    ``serve``), any thread submits, cancels and reads.

    Args:
      model: the target.
      drafter: who drafts; None decodes plainly.
      sizes: batch sizes that get programs of their own, ascending; the largest is the
        number of slots. The batch grows when requests wait and shrinks when few are
        left, since a round costs the whole batch. One int is the only size.
      context: most tokens of a request, prompt and new ones together.
      queue: requests that may wait; ``submit`` refuses more.
      rule: accept rule of requests that sample; by default ``coupled``, with which a
        seed gives the same text in any batch, with and without drafts. An engine whose
        rule is ``greedy`` has fewer programs and takes requests of temperature 0 only.
      log_prob: record log-probabilities of new tokens.
      adaptive: leave out drafts where they do not pay; else always draft.
      table: tokens that a request may bias, forbid or force.
      prefixes: prompts whose caches are kept, the latest used ones; a prompt that begins
        like one of them is scored from there. Each takes a slot's memory.
      mesh: lay model and slots out over devices (``jspec.serve.mesh``); the axes are
        ``data`` and ``model``.
      eos_ids: token ids that end a request; by default the model's own.

    Raises:
      ValueError: bad sizes, or a drafter for another target.
    """

    def __init__(
        self,
        model: Model,
        drafter: Drafter | Draft | None = None,
        *,
        sizes: int | Sequence[int] = 8,
        context: int = 1024,
        queue: int = 64,
        rule: Rule = verify.coupled,
        log_prob: bool = False,
        adaptive: bool = True,
        table: int = 8,
        prefixes: int = 4,
        mesh: jax.sharding.Mesh | None = None,
        eos_ids: Sequence[int] | None = None,
    ):
        sizes = (sizes,) if isinstance(sizes, int) else tuple(sizes)
        if not sizes or min(sizes) < 1 or list(sizes) != sorted(set(sizes)):
            raise ValueError(f"sizes are {sizes}; give ascending numbers of slots")
        checks.count("queue", queue, 1)
        checks.count("prefixes", prefixes)
        checks.count("context", context, 2)
        self.shape = Shape(sizes, context, log_prob, table)
        self.programs = Programs(model, drafter, rule, self.shape, mesh, eos_ids)
        self._waiting, self._adaptive = Waiting(queue), adaptive
        self._known, self._most_known = (), prefixes
        self._owner: list[Ticket | None] = [None] * sizes[0]
        self._flights: collections.deque[_Flight] = collections.deque()
        self._state: Any = None  # a State, once warm
        self._paused, self._calm = False, 0
        self._alone, self._read_at = False, 0.0
        self._news = threading.Event()
        self._serving = threading.Lock()
        self.rounds = 0
        self.failure: BaseException | None = None

    # --- any thread ---------------------------------------------------------------

    def prepare(
        self, prompt: Prompt, *, seed: int | None = 0, **options: Any
    ) -> Prepared:
        """Checks a request; arguments are those of ``jspec.prepare`` for one prompt.

        Raises:
          ValueError: as ``jspec.prepare``; the message names the value.
        """
        return self.programs.prepare(prompt, seed=seed, **options)

    def submit(
        self,
        prompt: Prompt | Prepared,
        *,
        speculate: bool = True,
        seconds: float | None = None,
        sink: Callable | None = None,
        prefilled: State | None = None,
        **options: Any,
    ) -> Ticket:
        """Queues a request.

        Args:
          prompt: a text, token ids, or what ``prepare`` made of them.
          speculate: False decodes this request plainly.
          seconds: the request ends after so many, with what there is by then.
          sink: called from the engine's thread with every ``Piece``.
          prefilled: the request's ``prefill`` if it was computed elsewhere.
          **options: as for ``prepare``.

        Raises:
          Full: the queue is full; try again later.
          ValueError: as ``prepare``.
        """
        if not isinstance(prompt, Prepared):
            prompt = self.prepare(prompt, **options)
        elif options:
            raise ValueError("options belong to prepare, which was called already")
        ticket = Ticket(prompt, speculate, seconds, sink, prefilled)
        self._waiting.put(ticket)
        self._news.set()
        return ticket

    @property
    def serving(self) -> bool:
        """Whether a thread is in ``serve``."""
        return self._serving.locked()

    @property
    def load(self) -> tuple[int, int]:
        """Requests in slots, and requests that wait."""
        return sum(t is not None for t in self._owner), len(self._waiting)

    @property
    def costs(self) -> dict[int, Cost]:
        """What rounds of every size take, once warm."""
        return self._governor.costs

    # --- the engine's thread ------------------------------------------------------

    def warm_up(self) -> None:
        """Compiles every program and measures the rounds; takes a while, once."""
        if self._state is None:
            self._state, costs = warm_up(self.programs)
            self._governor = Governor(costs, always=not self._adaptive)

    def step(self) -> bool:
        """Admits, dispatches one round, and reads the one before. False when idle."""
        self.warm_up()
        self._drop_ended()
        self._admit()
        busy = any(t is not None for t in self._owner)
        if busy:
            self._dispatch()
        if self._flights and (len(self._flights) > 1 or not busy):
            self._read(self._flights.popleft())
        return busy or bool(self._flights) or bool(self._waiting)

    def run(self, tickets: Sequence[Ticket]) -> list[Result]:
        """Steps until all tickets have ended; their results."""
        while not all(t.ended for t in tickets):
            if not self.step():
                break
        while self._flights:
            self._read(self._flights.popleft())
        return [t.result() for t in tickets]

    def serve(self, stop: threading.Event) -> None:
        """Steps until ``stop`` is set, sleeping while there is nothing to do.

        A failure ends all requests with it, is kept in ``failure``, and is raised.

        Raises:
          RuntimeError: another thread is at it; the state has one owner.
        """
        if not self._serving.acquire(blocking=False):
            raise RuntimeError(SERVED)
        try:
            while not stop.is_set():
                if not self.step():
                    self._news.wait(0.05)
                    self._news.clear()
        except BaseException as error:
            self.failure = error
            raise
        finally:
            reason = "error" if self.failure else "cancelled"
            self._end_all(reason, self.failure)
            self._serving.release()

    def _end_all(self, reason: str, error: BaseException | None) -> None:
        for ticket in [*filter(None, self._owner), *self._waiting.clear()]:
            ticket.end(reason, error)
        self._owner = [None] * len(self._owner)
        self._flights.clear()
        if error is None and self._state is not None:
            everyone = np.ones(len(self._owner), bool)
            self._state = self.programs.evict(self._state, everyone)

    # --- between rounds -----------------------------------------------------------

    def _drop_ended(self) -> None:
        """Frees the slots of requests that were cancelled or are out of time."""
        now = time.monotonic()
        ended = np.zeros(len(self._owner), bool)
        for slot, ticket in enumerate(self._owner):
            if ticket is None:
                continue
            ticket.expire(now)
            if ticket.ended:
                ended[slot] = True
                self._owner[slot] = None
        if ended.any():
            self._state = self.programs.evict(self._state, ended)
        self._waiting.expire(now)

    def _admit(self) -> None:
        self._fit_size()
        for slot, owner in enumerate(self._owner):
            if owner is not None:
                continue
            ticket = self._waiting.take()
            if ticket is None:
                return
            one = switch.turned(self._prefilled(ticket), ticket.speculate)
            self._state = self.programs.insert(self._state, one, slot)
            self._owner[slot], self._alone = ticket, False
            ticket.admitted()

    def _prefilled(self, ticket: Ticket) -> State:
        if ticket.prefilled is not None:
            return ticket.prefilled
        prompt = ticket.prepared.prompt
        ticket.shared, used = prefixes.longest(self._known, prompt)
        begun = None if used is None else used.filled
        one, left = self.programs.prefill(ticket.prepared, begun, ticket.shared)
        new = prefixes.Entry(np.asarray(prompt), left)
        self._known = prefixes.remember(self._known, new, used, self._most_known)
        return one

    def _fit_size(self) -> None:
        """Moves to a larger batch if requests wait, to a smaller one after a calm time."""
        busy = [slot for slot, t in enumerate(self._owner) if t is not None]
        need = min(len(busy) + len(self._waiting), self.shape.sizes[-1])
        fitting = next(s for s in self.shape.sizes if s >= need)
        size = len(self._owner)
        self._calm = self._calm + 1 if fitting < size else 0
        if fitting == size or (fitting < size and self._calm < self.shape.patience):
            return
        self._calm, self._alone = 0, False
        owners = [self._owner[slot] for slot in busy]
        self._owner = owners + [None] * (fitting - len(busy))
        self._state = self.programs.resize(self._state, busy, fitting)

    def _dispatch(self) -> None:
        size = len(self._owner)
        owners = [(slot, t) for slot, t in enumerate(self._owner) if t is not None]
        wanted = self.programs.drafts and any(t.speculate for _, t in owners)
        wanted = wanted and self._governor.speculate(size)
        resumed = wanted and self._paused
        if resumed:
            self._state = self.programs.resume(self._state)
        self._paused = not wanted
        cold = all(t.prepared.cold for _, t in owners)
        self._state, look = self.programs.round(self._state, wanted, cold)
        # Of the second of two rounds in flight the end of the first is the beginning.
        alone = self._alone and bool(self._flights)
        self._flights.append(_Flight(look, owners, wanted, resumed, size, alone))
        self.rounds, self._alone = self.rounds + 1, True

    def _read(self, flight: _Flight) -> None:
        look = jax.device_get(flight.look)
        before, self._read_at = self._read_at, time.perf_counter()
        running = emitted = 0
        for slot, ticket in flight.owners:
            count = int(look.count[slot])
            running, emitted = running + (count > 0), emitted + count
            if ticket.ended:
                continue
            log_prob = None if look.log_prob is None else look.log_prob[slot, :count]
            ticket.add(look.tokens[slot, :count], int(look.proposed[slot]), log_prob)
            reason = int(look.reason[slot])
            if reason == FAULT:
                ticket.end("error", generation.fault(len(ticket.tokens)))
            elif reason != RUNNING:
                ticket.end(generation.REASONS[reason])
            if ticket.ended and reason != RUNNING:
                # Ended on the device as well: free at once.
                self._owner = [None if t is ticket else t for t in self._owner]
        if running:  # else a round that came too late for anybody
            self._governor.learn(
                flight.size,
                tried=flight.drafted,
                drafted=bool(np.any(look.proposed)),
                tau=emitted / running,
                resumed=flight.resumed,
                seconds=self._read_at - before if flight.alone else None,
            )
