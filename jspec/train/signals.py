"""SIGTERM and Ctrl-C as a wish to be asked for, so that work can end in order."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

_KINDS = signal.SIGINT, signal.SIGTERM


class Wish:
    """``number`` is the signal that came, or None."""

    number: int | None = None


@contextmanager
def deferred() -> Iterator[Wish]:
    """Notes the first SIGTERM or Ctrl-C; a second one acts as it did before.

    Outside the main thread, where handlers cannot be set, nothing is noted.
    """
    wish = Wish()
    if threading.current_thread() is not threading.main_thread():
        yield wish
        return
    before = {kind: signal.getsignal(kind) for kind in _KINDS}

    def restore() -> None:
        for kind, handler in before.items():
            signal.signal(kind, handler)

    def note(number, _) -> None:
        wish.number = number
        restore()

    try:
        for kind in _KINDS:
            signal.signal(kind, note)
        yield wish
    finally:
        restore()


def leave(number: int, done: str, say: Callable[[str], None]) -> NoReturn:
    """Says what is done and how to go on, and exits with the signal's status."""
    say(
        f"{signal.Signals(number).name}: {done}; run the same command again to continue"
    )
    raise SystemExit(128 + number)
