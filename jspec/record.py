"""One line of JSON: what a method did, what it costs, and where it was run."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

import jax

from jspec import measure, trial, verify
from jspec.drafters import Draft
from jspec.models import Model
from jspec.requests import prepare
from jspec.types import DraftShape, Rule


class Method(NamedTuple):
    """What is compared with plain decoding.

    Attributes:
      name: for table and JSON.  draft: the drafter; None is plain decoding itself.
      rule: accept rule; None is the best exact one.
    """

    name: str
    draft: Draft | None
    rule: Rule | None = None


class Settings(NamedTuple):
    """How methods are run; options of ``jspec.bench`` by their names."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    batch: int = 1
    json: str | None = None
    smoke: bool = False


def record(
    model: Model,
    one: Method,
    pairs: Sequence[trial.Pair],
    slots: int,
    settings: Settings,
) -> dict:
    """Measures the terms of a method's rounds and gathers the fields of its line.

    Args:
      model: the target.  one: the method.
      pairs: what it made of the prompts; at least one.
      slots, settings: what it was run with.
    """
    sampling = {"temperature": settings.temperature, "seed": settings.seed}
    prompts = pairs[0].batch.prompts
    request = prepare(model, one.draft, prompts, rule=one.rule, slots=slots, **sampling)
    total = trial.summarise(pairs)
    ours, shape = total.ours, request.draft.drafter.shape
    shares = measure.width_shares(shape, ours.lengths, settings.batch)
    few = {"runs": 4} if settings.smoke else {}
    terms = measure.terms(
        model, one.draft, prompts, rule=one.rule, slots=slots, **few, **sampling
    ).at(shares)
    greedy = settings.temperature == 0
    same_text = greedy or request.rule is verify.coupled
    apart = trial.compare(model, pairs, slots) if same_text else trial.Divergence()
    exact = verify.is_lossless(request.rule, settings.temperature)
    has_gap = greedy and apart.gap is not None and math.isfinite(apart.gap)
    gap = apart.gap if has_gap else None
    return {
        "method": one.name,
        "target": model.name,
        "drafter": request.draft.name,
        "rule": _rule_name(request.rule),
        "topology": topology(shape),
        "temperature": settings.temperature,
        "batch": settings.batch,
        "prompts": total.prompts,
        "new_tokens": ours.new_tokens,
        "rounds": ours.rounds,
        "tau": ours.tau,
        "acceptance_by_depth": list(ours.acceptance_by_depth),
        "tokens_per_s": ours.tokens_per_s,
        "ar_tokens_per_s": total.plain.tokens_per_s,
        "speedup": total.speedup,
        "predicted_speedup": terms.speedup(ours.tau),
        "t_ar_ms": terms.ar,
        "t_draft_ms": terms.draft,
        "t_verify_ms": terms.verify,
        "t_round_ms": terms.round,
        "overhead": terms.overhead,
        "lossless": apart.is_tie if greedy else exact,
        "first_divergence": apart.first,
        "max_logit_gap": gap,
        "device": device(),
        "dtype": jax.numpy.dtype(model.dtype).name,
        "jax": jax.__version__,
        "seed": settings.seed,
        "commit": commit(),
    }


def topology(shape: DraftShape) -> str:
    """The form of a drafter's blocks in words."""
    if shape.depth == 0:
        return "none"
    if shape.nodes == shape.depth + 1:
        return f"chain of {shape.depth}"
    return f"tree of {shape.nodes - 1}, depth {shape.depth}"


def _rule_name(rule: Rule) -> str:
    """Its name; a rule made by a function has the name of that."""
    return getattr(rule, "__qualname__", repr(rule)).split(".")[0]


def device() -> str:
    """What the default device is, with the number of cores if it is a CPU."""
    kind = jax.devices()[0].device_kind
    return f"cpu ({os.cpu_count()} cores)" if kind == "cpu" else kind


def commit() -> str | None:
    """The commit of the checkout that jspec runs from; None if it runs from none."""
    package = Path(__file__).parent
    git = ["git", "-C", str(package)]
    try:
        top = _output([*git, "rev-parse", "--show-toplevel"])
        # An environment may lie in another project's checkout.
        if Path(top) / package.name != package:
            return None
        changed = _output([*git, "status", "--porcelain", "--untracked-files=no"])
        return _output([*git, "rev-parse", "HEAD"]) + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _output(command: list[str]) -> str:
    return subprocess.run(
        command, check=True, capture_output=True, text=True
    ).stdout.strip()


@contextlib.contextmanager
def lines(path: str | None) -> Iterator[TextIO | None]:
    """The JSON file, opened before anything is computed, so that errors come early."""
    if path is None:
        yield None
        return
    with Path(path).expanduser().open("a", encoding="utf-8") as file:
        yield file


def append(file: TextIO | None, record: dict) -> None:
    """Writes a line through to the disk; without a file nothing."""
    if file is None:
        return
    file.write(json.dumps(record, allow_nan=False) + "\n")
    file.flush()
    os.fsync(file.fileno())
