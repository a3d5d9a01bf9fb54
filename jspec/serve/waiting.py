"""The queue in front of an engine: bounded, and safe between threads."""

from __future__ import annotations

import collections
import threading

from jspec.serve.request import Full, Ticket


class Waiting:
    """Requests that wait, first come first served; ``most`` of them."""

    def __init__(self, most: int):
        self.most = most
        self._tickets: collections.deque[Ticket] = collections.deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._tickets)

    def put(self, ticket: Ticket) -> None:
        """Adds one at the end.

        Raises:
          Full: there is no room.
        """
        with self._lock:
            if len(self._tickets) >= self.most:
                raise Full(f"{self.most} requests are waiting already; try again later")
            self._tickets.append(ticket)

    def take(self) -> Ticket | None:
        """The first one, None if nobody waits."""
        with self._lock:
            return self._tickets.popleft() if self._tickets else None

    def expire(self, now: float) -> None:
        """Drops those that were cancelled or are out of time."""
        with self._lock:
            for ticket in self._tickets:
                ticket.expire(now)
            alive = [t for t in self._tickets if not t.ended]
            self._tickets = collections.deque(alive)

    def clear(self) -> list[Ticket]:
        """Empties the queue; who was in it."""
        with self._lock:
            gone = list(self._tickets)
            self._tickets.clear()
            return gone
