"""A ``jspec serve`` process that is watched, killed and started again. Linux only."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx


class Served:
    """A server process and its address."""

    def __init__(self, words: Sequence[str], port: int, log: Path):
        command = [sys.executable, "-m", "jspec", "serve", *words, "--port", str(port)]
        self.address = f"http://127.0.0.1:{port}"
        self._log = log
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT
            )

    def ready(self, seconds: float = 300) -> None:
        """Waits until it answers.

        Raises:
          RuntimeError: it ended, or does not answer in time; the message has its log.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.address}/health").status_code == 200:
                    return
            time.sleep(0.1)
        raise RuntimeError(f"the server is not there: {self._log.read_text()[-2000:]}")

    def memory(self) -> float:
        """Resident megabytes of the process."""
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE") / 1e6

    def idle(self, seconds: float = 60) -> bool:
        """Whether no request is left in a slot or in the queue after some time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            health = httpx.get(f"{self.address}/health").json()
            if (health["running"], health["waiting"]) == (0, 0):
                return True
            time.sleep(0.05)
        return False

    def kill(self, how: int = signal.SIGKILL) -> int:
        """Ends the process by a signal; its exit status."""
        self._process.send_signal(how)
        return self._process.wait(60)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None


def free_port() -> int:
    """A port of the loopback device that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def served(words: Sequence[str], port: int, log: Path) -> Iterator[Served]:
    """Runs ``jspec serve`` with these options; it is gone afterwards.

    Args:
      words: of the command line.  port: to listen on.
      log: what it prints is appended there.
    """
    server = Served(words, port, log)
    try:
        server.ready()
        yield server
    finally:
        if server.alive:
            server.kill(signal.SIGTERM)
