"""What a training run says: one JSON line a step, progress, curves."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from jspec.train.atomic import replacing

_PLAIN_EVERY = 30.0  # seconds between lines that do not go to a terminal


class Log:
    """A file of JSON lines, every step once and in order; use it as a context."""

    def __init__(self, path: Path, step: int):
        """Opens the file and drops the lines of steps after ``step``.

        A killed run has written lines after its last checkpoint, the last of them
        perhaps in part; they will be written again.
        """
        keep = [line for line in read(path) if line["step"] <= step]
        with replacing(path) as file:
            file.write("".join(json.dumps(line) + "\n" for line in keep).encode())
        self._file = path.open("a", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self._file.close()

    def write(self, line: dict) -> None:
        """Appends a line, at once; raises OSError if it cannot."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def read(path: str | Path) -> list[dict]:
    """The whole lines of a metrics file; none if there is no file."""
    path = Path(path)
    if not path.exists():
        return []
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break  # the end of a killed run
    return lines


class Meter:
    """Progress with tokens a second and the time left; use it as a context.

    A bar on a terminal, elsewhere a line every half minute and one at the end. Both go
    to standard error.
    """

    def __init__(self, what: str, start: int, total: int):
        """Counts ``what`` (step, conversation, ..) from ``start`` to ``total``."""
        self._console = Console(stderr=True)
        self._what, self._first, self._total = what, start, total
        self._tokens = 0
        self._begin: float | None = None
        self._printed = time.monotonic()
        self._bar = Progress(
            TextColumn(what),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total, completed=start, text="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """Prints a line beside the bar."""
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def advance(self, done: int, tokens: int, note: str = "") -> None:
        """So many are done in all, the latest of them with so many tokens."""
        now = time.monotonic()
        if self._begin is None:  # compiling took most of the time so far
            self._begin, self._first, tokens = now, done, 0
        self._tokens += tokens
        seconds = max(now - self._begin, 1e-9)
        text = f"{note}{self._tokens / seconds:.0f} tokens/s"
        self._bar.update(self._task, completed=done, text=text)
        if self._console.is_terminal:
            return
        if now - self._printed >= _PLAIN_EVERY or done == self._total:
            self._printed = now
            left = seconds / max(done - self._first, 1) * (self._total - done)
            self.say(f"{self._what} {done}/{self._total}, {text}, {left:.0f} s left")


def curve(log: str | Path, png: str | Path) -> None:
    """Draws every metric of a metrics file over the steps, one panel each.

    A vector is as many lines.
    """
    from matplotlib.figure import Figure  # late: a second, and only at the end

    lines = read(log)
    skip = ("step", "seconds", "tokens")
    names = list(dict.fromkeys(n for line in lines for n in line if n not in skip))
    columns = min(len(names), 3)
    figure = Figure(
        figsize=(5 * columns, 3 * math.ceil(len(names) / columns)), layout="constrained"
    )
    for i, name in enumerate(names):
        axes = figure.add_subplot(math.ceil(len(names) / columns), columns, i + 1)
        points = [(line["step"], line[name]) for line in lines if name in line]
        axes.plot(*zip(*points, strict=True), marker="." if len(points) < 50 else "")
        axes.set(title=name, xlabel="step")
        axes.grid(alpha=0.3)
    figure.savefig(png, dpi=100)
