"""Spec-Bench: its questions, its answer files and its metrics, and corrected ones.

Xia et al. 2401.07851. Six tasks; a question may have two turns, the second asked about the
answer to the first. Greedy, one question at a time. A line of an answer file is what
Spec-Bench's own scripts read: per turn the text, the decoding steps, new tokens and wall
time, and ``accept_lengths``, tokens emitted in every step, the bonus included.

Its speed-up is the ratio of mean tokens a second over questions, with the baseline's tokens
counted anew from its text, less one, but a method's as it reported them. Here tokens are
counted as emitted on both sides and times leave the prompt out; both figures are given.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jspec.drafters.draft import Draft
from jspec.generation import generate
from jspec.models import Model

# Eight categories of MT-bench are one task.
_MT_BENCH = (
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
)
WARM_UPS = 3


class Asked(NamedTuple):
    """A question with all its turns."""

    id: int | str
    category: str
    turns: list[str]


def task(category: str) -> str:
    """The task that a category is counted under."""
    return "mt_bench" if category in _MT_BENCH else category


def read(path: str | Path, limit: int | None = None) -> list[Asked]:
    """Questions of ``question.jsonl``, ``limit`` of them from the tasks in turn.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a line lacks a field; or ``limit < 1``.
    """
    path = Path(path).expanduser()
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; at least 1 question is needed")
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no file {path}; fetch Spec-Bench's questions"
        )
    groups: dict[str, list[Asked]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            asked = Asked(
                fields["question_id"], fields["category"], list(fields["turns"])
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number}: no question ({error!r})"
            ) from error
        groups.setdefault(task(asked.category), []).append(asked)
    longest = max(map(len, groups.values()), default=0)
    turn = [g[i] for i in range(longest) for g in groups.values() if i < len(g)]
    return turn[:limit]


def answer(
    model: Model, draft: Draft | None, asked: Asked, name: str, **arguments: Any
) -> dict | None:
    """Answers all turns of a question; the line of the answer file.

    None if a turn does not fit the model's context.

    Args:
      model, draft: who answers.  name: ``model_id`` of the line.
      **arguments: see ``jspec.prepare``; ``slots`` and ``max_new_tokens`` among them.
    """
    messages: list[dict] = []
    choice: dict[str, Any] = {"index": 0, "turns": []}
    counts = ("decoding_steps", "new_tokens", "wall_time", "accept_lengths")
    choice |= {count: [] for count in (*counts, "decode_time")}
    for words in asked.turns:
        messages.append({"role": "user", "content": words})
        ids = model.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        room = arguments.get("slots") or model.config.max_position
        if len(ids) + arguments["max_new_tokens"] > room:
            return None
        out = generate(model, draft, ids, **arguments)
        stats = out.stats
        choice["turns"].append(out.text[0])
        choice["decoding_steps"].append(stats.rounds)
        choice["new_tokens"].append(stats.new_tokens)
        choice["wall_time"].append(stats.seconds + stats.prefill_seconds)
        choice["decode_time"].append(stats.seconds)
        choice["accept_lengths"] += _lengths(stats)
        messages.append({"role": "assistant", "content": out.text[0]})
    return {
        "question_id": asked.id,
        "category": asked.category,
        "answer_id": uuid.uuid4().hex,
        "model_id": name,
        "choices": [choice],
        "tstamp": time.time(),
    }


def _lengths(stats) -> list[int]:
    """Tokens emitted in every round, in no particular order: shares give the counts."""
    shares = [1.0, *stats.acceptance_by_depth, 0.0]
    at_least = [round(share * stats.rounds) for share in shares]
    return [
        n
        for n, (a, b) in enumerate(itertools.pairwise(at_least), 1)
        for _ in range(a - b)
    ]


class Score(NamedTuple):
    """One task, or all of them: ``published`` and ``corrected`` speed-up, mean accepted
    tokens (bonus included) and whether all texts are the baseline's."""

    published: float
    corrected: float
    accepted: float
    same: bool


def scores(
    ours: Sequence[dict], plain: Sequence[dict], count: Callable[[str], int]
) -> dict[str, Score]:
    """Metrics of a method's answers against the baseline's, by task and ``overall``.

    Args:
      ours, plain: lines of answer files about the same questions.
      count: tokens of a text, as ``speed.py`` counts the baseline's.

    Raises:
      ValueError: the files answer different questions.
    """
    baseline = {line["question_id"]: line for line in plain}
    if {line["question_id"] for line in ours} != set(baseline):
        raise ValueError("the two files answer different questions; run both anew")
    groups: dict[str, list[dict]] = {}
    for line in ours:
        groups.setdefault(task(line["category"]), []).append(line)
    groups["overall"] = list(ours)
    return {
        name: _score(group, [baseline[x["question_id"]] for x in group], count)
        for name, group in groups.items()
    }


def _score(ours: Sequence[dict], plain: Sequence[dict], count) -> Score:
    def mean_rate(lines: Sequence[dict], tokens: Callable[[dict], float], seconds: str):
        return statistics.fmean(
            tokens(c) / sum(c[seconds]) for line in lines for c in line["choices"]
        )

    def emitted(c: dict) -> int:
        return sum(c["new_tokens"])

    def counted(c: dict) -> int:
        return sum(count(text) - 1 for text in c["turns"])

    steps = [n for x in ours for c in x["choices"] for n in c["accept_lengths"]]
    return Score(
        mean_rate(ours, emitted, "wall_time") / mean_rate(plain, counted, "wall_time"),
        mean_rate(ours, emitted, "decode_time")
        / mean_rate(plain, emitted, "decode_time"),
        statistics.fmean(steps),
        all(
            a["choices"][0]["turns"] == b["choices"][0]["turns"]
            for a, b in zip(ours, plain, strict=True)
        ),
    )
