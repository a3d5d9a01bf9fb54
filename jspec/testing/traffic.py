"""Clients of a completion server that behave as clients do, and check every answer.

They read whole answers and streams, set stop strings and deadlines, go away in the middle
or before the first token, and send bodies that no server should take. Needs ``httpx``.
"""

from __future__ import annotations

import collections
import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import NamedTuple

import httpx

from jspec import generation
from jspec.models import Model

# How many of 20 requests do what.
MIX = {
    "whole": 6,
    "stream": 4,
    "stop": 3,
    "leave": 2,
    "never wait": 2,
    "deadline": 1,
    "bad": 2,
}
# Bodies, and the status each must get.
BAD: tuple[tuple[bytes, int], ...] = (
    (b"{", 400),
    (b"\xff\xfe", 400),
    (b"[1, 2]", 400),
    (b"{}", 400),
    (b'{"prompt": "a", "n": 2}', 400),
    (b'{"prompt": "a", "colour": "red"}', 400),
    (b'{"prompt": "a", "max_tokens": -1}', 400),
    (b'{"prompt": "a", "temperature": "hot"}', 400),
    (b'{"prompt": [1, 1000000000]}', 400),
    (json.dumps({"prompt": "a" * 20_000}).encode(), 400),
    (b" " * 2_000_000, 413),
)


class Case(NamedTuple):
    """A body of ``/v1/completions``, and the text that answers it."""

    body: dict
    text: str


def cases(model: Model, prompts: Sequence[str], new: int, slots: int) -> list[Case]:
    """Every prompt, greedily and sampled, as ``jspec.generate`` answers it alone.

    Args:
      model: the server's target.
      new: tokens of every answer.  slots: context of one program for all.
    """
    found = []
    for seed, prompt in enumerate(prompts):
        for temperature in (0.0, 0.8):
            out = generation.generate(
                model,
                None,
                [prompt],
                max_new_tokens=new,
                temperature=temperature,
                seed=[seed],
                slots=slots,
                chat=False,
            )
            body = dict(
                prompt=prompt, max_tokens=new, temperature=temperature, seed=seed
            )
            found.append(Case(body, out.text[0]))
    return found


class Tally:
    """What became of the requests; ``wrong`` describes answers that should not be."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self._lock = threading.Lock()

    @property
    def done(self) -> int:
        return sum(self.counts[name] for name in MIX)

    def add(self, name: str, wrong: str | None = None) -> None:
        with self._lock:
            self.counts[name] += 1
            if wrong is not None:
                self.wrong.append(f"{name}: {wrong}")


def play(
    address: str,
    known: Sequence[Case],
    count: int,
    *,
    clients: int = 12,
    seed: int = 0,
    look: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Sends ``count`` requests from so many clients at once; what became of them.

    Args:
      address: of the server.  known: what is asked, with its answers.
      seed: of what the clients do.
      look: called with the tally twice a second.
    """
    tally, shares = Tally(), [count // clients] * clients
    shares[0] += count % clients

    def one(number: int) -> None:
        chance = random.Random(f"{seed}, {number}")
        with httpx.Client(base_url=address, timeout=120) as http:
            for _ in range(shares[number]):
                name = chance.choices(list(MIX), weights=list(MIX.values()))[0]
                try:
                    wrong = _ACTS[name](http, chance.choice(known), chance, tally)
                except httpx.HTTPError as error:
                    wrong = f"{type(error).__name__}: {error}"
                tally.add(name, wrong)

    with ThreadPoolExecutor(clients) as pool:
        left = {pool.submit(one, i) for i in range(clients)}
        while left:
            ended, left = wait(left, timeout=0.5)
            for client in ended:
                client.result()  # raises what the client raised
            look(tally)
    return tally


def _post(http: httpx.Client, body: dict, tally: Tally) -> dict:
    """A whole answer; a full queue is tried again."""
    while True:
        got = http.post("/v1/completions", json=body)
        if got.status_code != 429:
            return got.raise_for_status().json()
        tally.add("tried again")
        time.sleep(0.05)


def _stream(http: httpx.Client, body: dict, tally: Tally, most: int | None = None):
    """The joined text of a stream and why it ended; None after ``most`` events."""
    while True:
        with http.stream(
            "POST", "/v1/completions", json=body | {"stream": True}
        ) as got:
            if got.status_code != 429:
                got.raise_for_status()
                return _read(got, most)
        tally.add("tried again")
        time.sleep(0.05)


def _read(got: httpx.Response, most: int | None) -> tuple[str, str | None]:
    text, reason, events = "", None, 0
    for line in got.iter_lines():
        if events == most or line == "data: [DONE]":
            break
        if line:
            choice = json.loads(line.removeprefix("data: "))["choices"][0]
            text, reason = text + choice["text"], choice["finish_reason"]
            events += 1
    return text, reason


def _differs(got: str, want: str) -> str | None:
    return None if got == want else f"got {got!r} instead of {want!r}"


def _is_no_start(got: str, want: str) -> str | None:
    # A character whose last bytes never came is shown as a replacement.
    fits = want.startswith(got.rstrip("\ufffd"))
    return None if fits else f"{got!r} does not begin {want!r}"


def _whole(http, case: Case, chance, tally) -> str | None:
    answer = _post(http, case.body, tally)
    return _differs(answer["choices"][0]["text"], case.text)


def _streamed(http, case: Case, chance, tally) -> str | None:
    return _differs(_stream(http, case.body, tally)[0], case.text)


def _stopped(http, case: Case, chance: random.Random, tally) -> str | None:
    # Incomplete characters, shown as replacements, would end the text as well.
    pairs = [case.text[i : i + 2] for i in range(len(case.text) - 1)]
    stop = chance.choice([pair for pair in pairs if "\ufffd" not in pair])
    text, reason = _stream(http, case.body | {"stop": [stop]}, tally)
    if reason != "stop":
        return f"ended by {reason}"
    return _differs(text, case.text[: case.text.index(stop)])


def _leave(http, case: Case, chance: random.Random, tally) -> str | None:
    text, _ = _stream(http, case.body, tally, most=chance.randrange(6))
    return _is_no_start(text, case.text)


def _never_wait(http, case: Case, chance: random.Random, tally) -> str | None:
    try:
        patience = chance.choice((0.002, 0.02, 0.1))
        got = http.post("/v1/completions", json=case.body, timeout=patience)
    except httpx.TimeoutException:
        return None
    if got.status_code == 429:
        return None
    return _differs(got.json()["choices"][0]["text"], case.text)


def _deadline(http, case: Case, chance: random.Random, tally) -> str | None:
    seconds = chance.choice((1e-4, 0.02, 0.05))
    answer = _post(http, case.body | {"timeout": seconds}, tally)
    return _is_no_start(answer["choices"][0]["text"], case.text)


def _bad(http, case: Case, chance: random.Random, tally) -> str | None:
    body, status = chance.choice(BAD)
    got = http.post("/v1/completions", content=body)
    if got.status_code == status and got.json()["error"]["message"]:
        return None
    return f"{body[:60]!r} got {got.status_code} instead of {status}"


_ACTS = {
    "whole": _whole,
    "stream": _streamed,
    "stop": _stopped,
    "leave": _leave,
    "never wait": _never_wait,
    "deadline": _deadline,
    "bad": _bad,
}
