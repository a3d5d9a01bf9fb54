"""Prompts for benchmarks, from JSON lines in the form of Spec-Bench."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

# Questions over several categories, small enough to come with the package.
DEFAULT = Path(__file__).parent / "data" / "prompts.jsonl"
# Beginnings of questions of all kinds, for a target that finishes them itself.
OPENINGS = Path(__file__).parent / "data" / "openings.jsonl"


class Question(NamedTuple):
    """One prompt of a benchmark.

    Attributes:
      id: ``question_id`` of the file.  category: what kind of text it asks for.
      prompt: the first turn: text, or token ids that are taken as they are.
    """

    id: str | int
    category: str
    prompt: str | list[int]


def load_prompts(
    path: str | Path | None = None, limit: int | None = None
) -> list[Question]:
    """Questions of a file, in turn over its categories.

    The file holds one JSON object a line with ``question_id``, ``category`` and
    ``turns`` (a list; other fields are not read), as in Spec-Bench (Xia et al.
    2401.07851). Only the first turn is used: the later ones ask about an answer.

    Args:
      path: the file; None is the set that comes with jspec.
      limit: how many questions, taken from the categories in turn, so that a small
        number still covers all of them; None is all.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a line is not JSON or lacks a field, a prompt is empty, or there is no
        line at all; the message names file and line. Or ``limit < 1``.
    """
    path = DEFAULT if path is None else Path(path).expanduser()
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; at least 1 prompt is needed")
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no prompt file {path}; give a file of JSON lines with "
            "question_id, category and turns"
        )
    lines = path.read_text(encoding="utf-8").splitlines()
    questions = [
        _question(line, f"{path}, line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not questions:
        raise ValueError(f"{path} holds no prompts")
    return _in_turn(questions)[:limit]


def _question(line: str, where: str) -> Question:
    try:
        fields = dict(json.loads(line))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: not a JSON object ({error})") from error
    missing = [f for f in ("question_id", "category", "turns") if f not in fields]
    if missing:
        raise ValueError(f"{where}: the field {missing[0]!r} is missing")
    turns = fields["turns"]
    if not isinstance(turns, list) or not turns or not _is_prompt(turns[0]):
        raise ValueError(
            f"{where}: 'turns' must be a list that begins with a prompt (a text that is "
            "not empty, or a list of token ids)"
        )
    return Question(fields["question_id"], str(fields["category"]), turns[0])


def _is_prompt(turn: Any) -> bool:
    if isinstance(turn, str):
        return bool(turn.strip())
    return isinstance(turn, list) and bool(turn) and all(type(i) is int for i in turn)


def _in_turn(questions: list[Question]) -> list[Question]:
    """First of every category, second of every category, ..; categories as they come."""
    groups: dict[str, list[Question]] = {}
    for question in questions:
        groups.setdefault(question.category, []).append(question)
    rounds = itertools.zip_longest(*groups.values())
    return [q for round_ in rounds for q in round_ if q is not None]
