"""A server under clients that stream, stop, leave and send nonsense, for a long time.

Every answer is compared with that of ``jspec.generate``. Afterwards no slot may be taken,
the memory of the process may not have grown, and a server that is killed in the middle of
all this must start again on the same port and go on answering.

    python benchmarks/soak.py --requests 1000
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import jspec
from jspec.compilation import enable_cache
from jspec.testing import tiny, traffic
from jspec.testing.served import Served, free_port, served

PROMPTS = [f"A common beginning, then {word}" for word in ("this", "that", "more")]
PROMPTS += ["a", "abcabcabc", "x" * 100]
CONTEXT, NEW = 192, 40


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--requests", type=int, default=1000, help="in all (1000)")
    add("--clients", type=int, default=16, help="at once (16)")
    add("--draft", default="ngram", help="as for jspec serve (ngram)")
    add("--growth", type=float, default=5.0, help="most growth of memory, percent (5)")
    add("--seed", type=int, default=0, help="of what the clients do (0)")
    args = parser.parse_args()
    enable_cache()
    model = tiny.model(seed=3, tokenizer=tiny.byte_tokenizer(), vocab_size=257)
    known = traffic.cases(model, PROMPTS, NEW, CONTEXT)
    with tempfile.TemporaryDirectory() as name:
        folder = jspec.save(model, Path(name) / "model")
        words = ["--target", str(folder), "--draft", args.draft, "--sizes", "1,4,8"]
        words += ["--context", str(CONTEXT), "--queue", "16"]
        port, log = free_port(), Path(name) / "log"
        with served(words, port, log) as server:
            faults = soak(server, known, args)
            faults += killed(server, known, args)
        with served(words, port, log) as server:
            faults += outcome(server, traffic.play(server.address, known, 100))
    for fault in faults:
        print(f"FAULT {fault}")
    print("a killed server restarted and answered" if not faults else "NOT PASSED")
    return int(bool(faults))


def soak(server: Served, known, args: argparse.Namespace) -> list[str]:
    """The traffic, with a line of progress every twentieth of it; what went wrong."""
    start, seen = time.monotonic(), []

    def look(tally: traffic.Tally) -> None:
        if tally.done * 20 < len(seen) * args.requests:
            return
        seen.append(server.memory())
        print(
            f"{time.monotonic() - start:6.1f} s  {tally.done:6} requests  "
            f"{len(tally.wrong)} wrong  {seen[-1]:7.1f} MB",
            flush=True,
        )

    tally = traffic.play(
        server.address,
        known,
        args.requests,
        clients=args.clients,
        seed=args.seed,
        look=look,
    )
    found = outcome(server, tally)
    print(", ".join(f"{n} {name}" for name, n in sorted(tally.counts.items())))
    # What the first fifth of the requests made the process allocate is its size.
    first, last = max(seen[: len(seen) // 5 + 1]), server.memory()
    grown = 100 * (last / first - 1)
    print(
        f"{first:.1f} MB after a fifth of the requests, {last:.1f} at the end: {grown:+.1f}%"
    )
    if grown > args.growth:
        found.append(f"memory grew by {grown:.1f}%")
    return found


def outcome(server: Served, tally: traffic.Tally) -> list[str]:
    """Wrong answers, and slots that are still taken."""
    return tally.wrong + ([] if server.idle() else ["a slot is still taken"])


def killed(server: Served, known, args: argparse.Namespace) -> list[str]:
    """Kills the server while it is busy; every client must notice."""
    ended = threading.Event()

    def clients() -> None:
        traffic.play(server.address, known, 64)
        ended.set()

    threading.Thread(target=clients, daemon=True).start()
    time.sleep(0.5)
    status = server.kill(signal.SIGKILL)
    print(f"killed while busy: status {status}")
    return [] if ended.wait(60) else ["clients of a killed server wait for ever"]


if __name__ == "__main__":
    sys.exit(main())
