"""Many methods in one table: what each needs, costs and gains, and what is done already.

A comparison's JSON lines are those of ``jspec.bench`` with more fields: ``family``,
``max_new_tokens``, ``uses_features``, ``memory_mb`` (the drafter's own weights and state)
and ``tasks``, per category ``tau`` and ``speedup``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.table import Table

from jspec import report, trial
from jspec.drafters.draft import Draft
from jspec.models import Model
from jspec.record import Method, Settings
from jspec.requests import prepare

_DEPTHS = 3


class Entry(NamedTuple):
    """A method of a comparison, made only when its turn comes.

    Attributes:
      name: for the table and to find it again.
      family: who drafts, in a word or two.
      make: ``model -> Draft``.
    """

    name: str
    family: str
    make: Callable[[Model], Draft]


def finished(
    path: str | None, settings: Settings, target: str, prompts: int
) -> list[dict]:
    """The lines of a file that were made with the same settings, target and prompts.

    Raises:
      ValueError: a line is not JSON.
    """
    if path is None or not Path(path).expanduser().is_file():
        return []
    wanted = {
        "target": target,
        "temperature": settings.temperature,
        "batch": settings.batch,
        "seed": settings.seed,
        "max_new_tokens": settings.max_new_tokens,
        "asked_prompts": prompts,
    }
    return [
        line
        for line in _lines(Path(path).expanduser())
        if all(line.get(name) == value for name, value in wanted.items())
    ]


def _lines(path: Path) -> Iterator[dict]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from error


def facts(
    model: Model,
    entry: Entry,
    one: Method,
    pairs: Sequence[trial.Pair],
    settings: Settings,
    prompts: int,
) -> dict[str, Any]:
    """The fields that a comparison adds to a method's line.

    Args:
      model, one, pairs, settings: as in ``record.record``.
      entry: where the method comes from.
      prompts: how many were asked for.
    """
    groups: dict[str, list[trial.Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair.batch.category, []).append(pair)
    totals = {name: trial.summarise(group) for name, group in groups.items()}
    shape = one.draft.drafter.shape if one.draft else None
    return {
        "family": entry.family,
        "max_new_tokens": settings.max_new_tokens,
        "asked_prompts": prompts,
        "uses_features": bool(shape and shape.taps),
        "memory_mb": memory(model, one.draft, pairs[0].batch.prompts) / 1e6,
        "tasks": {
            name: {"tau": total.ours.tau, "speedup": total.speedup}
            for name, total in totals.items()
        },
    }


def memory(model: Model, draft: Draft | None, prompts: Sequence) -> int:
    """Bytes of a drafter's weights and state that the target does not have already."""
    if draft is None:
        return 0
    shared = {id(x) for x in jax.tree.leaves(model.params)}
    own = {id(x): x for x in jax.tree.leaves(draft.params) if id(x) not in shared}
    request = prepare(model, draft, prompts, max_new_tokens=64)
    state = jax.eval_shape(lambda: request.prefill().draft)
    return sum(_bytes(x) for x in [*own.values(), *jax.tree.leaves(state)])


def _bytes(x: Any) -> int:
    return int(np.prod(x.shape)) * np.dtype(x.dtype).itemsize


def table(records: Sequence[dict]) -> Table:
    """One row a method, the fastest first."""
    out = Table(
        title="all methods, the fastest first",
        caption="feat.: does it read the target's hidden states? T_draft: milliseconds a "
        "round. tau: tokens a target forward, bonus included. accepted: share of rounds "
        "that kept at least 1, 2, 3 drafts. speed-up: over our own plain decoding. "
        "lossless: text compared with that, and the gap between logits where it parts. "
        "MB: the drafter's own weights and state.",
        caption_justify="left",
    )
    for name in ("method", "draft", "feat."):
        out.add_column(name)
    for name in ("T_draft", "tau"):
        out.add_column(name, justify="right")
    out.add_column("accepted")
    for name in ("tokens/s", "speed-up", "lossless", "MB"):
        out.add_column(name, justify="right")
    for r in sorted(records, key=lambda r: -r["tokens_per_s"]):
        out.add_row(*_row(r))
    return out


def _row(r: dict) -> list[str]:
    """Cells of one record; what a method of another library lacks is a dash."""

    def number(name: str, form: str) -> str:
        return "-" if r.get(name) is None else format(r[name], form)

    shares = r["acceptance_by_depth"]
    return [
        r["method"],
        r["topology"],
        "yes" if r["uses_features"] else "no",
        number("t_draft_ms", ".2f"),
        number("tau", ".2f"),
        " ".join(f"{share:.2f}" for share in shares[:_DEPTHS]),
        number("tokens_per_s", ".1f"),
        f"{r['speedup']:.2f}x",
        report.kept(r),
        number("memory_mb", ".1f"),
    ]


# Plots


def plots(records: Sequence[dict], folder: str | Path) -> list[Path]:
    """Draws three figures as PNG: speed-up by task, tau against cost, acceptance by depth.

    Raises:
      OSError: they cannot be written.
    """
    from matplotlib.figure import Figure

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, draw, width in (
        ("tasks", _tasks, 10),
        ("cost", _cost, 6.5),
        ("depth", _depth, 6.5),
    ):
        figure = Figure(figsize=(width, 4.5), layout="constrained")
        draw(figure.subplots(), records)
        drawn.append(folder / f"{name}.png")
        figure.savefig(drawn[-1], dpi=120)
    return drawn


def _tasks(axes, records: Sequence[dict]) -> None:
    records = [r for r in records if r["tasks"]]
    names = sorted({task for r in records for task in r["tasks"]})
    wide = 0.8 / max(len(records), 1)
    for i, r in enumerate(records):
        height = [r["tasks"].get(n, {}).get("speedup", np.nan) for n in names]
        axes.bar(np.arange(len(names)) + i * wide, height, wide, label=r["method"])
    axes.axhline(1, color="0.5", linewidth=1)
    axes.set_xticks(np.arange(len(names)) + 0.4 - wide / 2, names)
    axes.set_ylabel("speed-up over plain decoding")
    axes.legend(fontsize=6, ncols=2)


def _cost(axes, records: Sequence[dict]) -> None:
    known = [r for r in records if r.get("t_draft_ms") is not None]
    cost = [(r["t_draft_ms"] + r["t_verify_ms"]) / r["t_ar_ms"] for r in known]
    for x, r in zip(cost, known, strict=True):
        axes.plot(x, r["tau"], "o")
        axes.annotate(r["method"], (x, r["tau"]), fontsize=6)
    edge = np.array([0, 1.1 * max(cost, default=1)])
    for gain in (0.5, 1, 1.5, 2, 3):
        axes.plot(edge, gain * edge, color="0.8", linewidth=1, zorder=0)
        axes.annotate(f"{gain}x", (edge[1], gain * edge[1]), fontsize=6, color="0.5")
    axes.set(xlim=edge, ylim=(0.9, 1.15 * max([r["tau"] for r in known], default=2)))
    axes.set_xlabel("(T_draft + T_verify) / T_plain")
    axes.set_ylabel("tau, bonus included")


def _depth(axes, records: Sequence[dict]) -> None:
    for r in (r for r in records if r["acceptance_by_depth"]):
        shares = r["acceptance_by_depth"]
        axes.plot(range(1, len(shares) + 1), shares, marker=".", label=r["method"])
    axes.set_xlabel("depth")
    axes.set_ylabel("share of rounds that kept so many drafts")
    axes.legend(fontsize=6)
