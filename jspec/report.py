"""Tables of a benchmark."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from jspec.trial import Pair, Summary, summarise

_DEPTHS = 6  # acceptance is printed for so many depths
_WIDTH = 110  # of tables that do not go to a terminal

CAPTION = (
    "tau: mean tokens emitted per target forward, the bonus included (plain decoding: 1)."
    " accepted: share of rounds that kept at least 1, 2, .. drafts. tokens/s: decoding"
    " only, prompts not counted. speed-up: over our own plain decoding of the same"
    " prompts, as ratio of totals and as median over the batches of prompts."
)


def console(error: bool = False) -> Console:
    """A console for tables (standard output) or for messages (standard error)."""
    stream = sys.stderr if error else sys.stdout
    return Console(stderr=error, width=None if stream.isatty() else _WIDTH)


def categories(title: str, pairs: Sequence[Pair]) -> Table:
    """One row a category and one for all of them."""
    table = Table(title=title, caption=CAPTION, caption_justify="left")
    table.add_column("category")
    table.add_column("prompts", justify="right")
    table.add_column("tau", justify="right")
    table.add_column("accepted by depth")
    for name in ("tokens/s", "plain", "speed-up", "median"):
        table.add_column(name, justify="right")
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair.batch.category, []).append(pair)
    for category, group in groups.items():
        table.add_row(category, *_cells(summarise(group)))
    table.add_section()
    table.add_row("all", *_cells(summarise(pairs)), style="bold")
    return table


def _cells(summary: Summary) -> list[str]:
    ours, shares = summary.ours, summary.ours.acceptance_by_depth
    more = " .." if len(shares) > _DEPTHS else ""
    return [
        str(summary.prompts),
        f"{ours.tau:.2f}",
        " ".join(f"{share:.2f}" for share in shares[:_DEPTHS]) + more,
        f"{ours.tokens_per_s:.1f}",
        f"{summary.plain.tokens_per_s:.1f}",
        f"{summary.speedup:.2f}x",
        f"{summary.median:.2f}x",
    ]


def methods(records: Sequence[dict]) -> Table:
    """One row a finished method, from its JSON record."""
    table = Table(
        title="finished methods",
        caption="Milliseconds a round: plain, draft, verify, whole; overhead = whole /"
        " (draft + verify); predicted = speed-up from these times and tau (bonus"
        " included). lossless: is every text plain decoding's? If not, the largest gap"
        " between the target's logits of two tokens where texts part.",
        caption_justify="left",
    )
    table.add_column("method")
    names = ("tau", "tokens/s", "speed-up", "predicted", "plain", "draft", "verify")
    for name in (*names, "round", "overhead", "lossless"):
        table.add_column(name, justify="right")
    for r in records:
        table.add_row(
            r["method"],
            f"{r['tau']:.2f}",
            f"{r['tokens_per_s']:.1f}",
            f"{r['speedup']:.2f}x",
            f"{r['predicted_speedup']:.2f}x",
            *(
                f"{r[f't_{name}_ms']:.2f}"
                for name in ("ar", "draft", "verify", "round")
            ),
            f"{r['overhead']:.2f}",
            kept(r),
        )
    return table


def kept(r: dict) -> str:
    """The cell "lossless" of a record: where texts part, with the gap between logits."""
    said, gap = "yes" if r["lossless"] else "NO", r.get("max_logit_gap")
    return said if gap is None else f"{said}, {gap:.2g}"
