"""Predicted against measured speed-up: does ``L = (T_draft + T_verify) / tau`` hold here?

Predicted is ``T_plain tau / (T_draft + T_verify)``. The three times are measured apart from
any generation (``jspec.measure``), right after the prompt was decoded both ways, so that
all figures see the same machine; only tau, and the lengths of the drafts, come from the
generation. Measured is the wall clock of plain decoding over the drafter's.
Fails if one is off by more than --within.

  python benchmarks/predicted.py --limit 4 --json lines.jsonl
  python benchmarks/predicted.py --drafters ngram checkpoints/medusa-smollm2-135m
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.table import Table

from jspec import load, load_drafter, measure, record, report, text, theory, trial
from jspec.arguments import add_target
from jspec.compilation import enable_cache
from jspec.drafters import Draft
from jspec.drafters.loading import PLAIN
from jspec.models import Model
from jspec.prompts import load_prompts
from jspec.tree_options import HEADS


def lines(
    model: Model, draft: Draft, prompts: list, new: int, runs: int
) -> list[dict[str, float]]:
    """One a prompt: rounds and seconds of both sides, and the terms of the rounds.

    Generations and terms are measured in turn, ``runs`` times, and the least of each
    counts: what disturbs a machine only ever adds.
    """
    longest = max(len(ids) for _, ids in prompts)
    slots = -(-(longest + new) // 64) * 64
    given = [one for one in trial.batches(prompts, 1) for _ in range(runs)]
    found = []
    for pair in trial.duel(model, draft, None, given, slots=slots, max_new_tokens=new):
        ours, plain = pair.ours.stats, pair.plain.stats
        terms = measure.terms(
            model, draft, pair.batch.prompts, slots=slots, runs=12
        ).at(measure.width_shares(draft.drafter.shape, ours.lengths))
        counts = {"tokens": ours.new_tokens, "rounds": ours.rounds}
        walls = {"seconds": ours.seconds, "plain_seconds": plain.seconds}
        times = {"ar": terms.ar, "draft": terms.draft, "verify": terms.verify}
        found.append(counts | walls | times | {"round": terms.round})
    groups = [found[i : i + runs] for i in range(0, len(found), runs)]
    return [{key: min(r[key] for r in g) for key in g[0]} for g in groups]


def summary(name: str, draft: Draft, found: list[dict]) -> dict:
    """The prompts together: times are means over rounds."""
    tokens, rounds = (sum(r[key] for r in found) for key in ("tokens", "rounds"))
    mean = {
        key: sum(r[key] * r[per] for r in found) / sum(r[per] for r in found)
        for key, per in (
            ("ar", "tokens"),
            ("draft", "rounds"),
            ("verify", "rounds"),
            ("round", "rounds"),
        )
    }
    tau = tokens / rounds
    seconds, plain = (
        sum(r[key] for r in found) for key in ("seconds", "plain_seconds")
    )
    predicted = theory.speedup(mean["ar"], mean["draft"], mean["verify"], tau)
    return {
        "drafter": name,
        "block": record.topology(draft.drafter.shape),
        "tau": tau,
        **mean,
        "predicted": predicted,
        "measured": plain / seconds,
        "plain_wall": 1e3 * plain / tokens,
        "wall": 1e3 * seconds / rounds,
        "ratio": predicted * seconds / plain,
        "device": record.device(),
        "commit": record.commit(),
    }


def shown(records: list[dict]) -> Table:
    table = Table(caption="times: ms a round; tau: bonus included")
    table.add_column("drafter")
    table.add_column("block")
    names = ("tau", "ar", "draft", "verify", "predicted", "measured", "ratio")
    for name in names:
        head = {"ar": "T_plain", "draft": "T_draft", "verify": "T_verify"}
        table.add_column(head.get(name, name), justify="right")
    for r in records:
        cells = [f"{r[name]:.2f}" for name in names]
        table.add_row(r["drafter"], r["block"], *cells)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    heads = sorted(str(file.parent) for file in HEADS.glob("*/config.json"))
    add = parser.add_argument
    add_target(parser)
    add("--drafters", nargs="+", default=[*PLAIN, *heads], metavar="NAME")
    add("--limit", type=int, default=4, metavar="N", help="prompts (4)")
    add("--max-new-tokens", type=int, default=64, metavar="N", help="a prompt (64)")
    add("--runs", type=int, default=3, metavar="N", help="the least of N counts (3)")
    add("--within", type=float, default=0.1, metavar="X", help="share (0.1)")
    add("--json", metavar="FILE", help="append a line a drafter; show all of its lines")
    args = parser.parse_args()
    enable_cache()
    model = load(args.target, dtype=args.dtype)
    questions = load_prompts(None, args.limit)
    size = model.config.vocab_size
    ids = text.encode(model.tokenizer, [q.prompt for q in questions], size)
    prompts = [(q.category, i) for q, i in zip(questions, ids, strict=True)]
    records = []
    with record.lines(args.json) as file:
        for name in args.drafters:
            draft = load_drafter(name, model)
            found = lines(model, draft, prompts, args.max_new_tokens, args.runs)
            records.append(summary(Path(name).name, draft, found))
            record.append(file, records[-1])
            print(f"{records[-1]['drafter']}: {records[-1]['ratio']:.3f}", flush=True)
    if args.json:
        written = Path(args.json).read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in written]
    report.console().print(shown(records))
    off = [r["drafter"] for r in records if abs(r["ratio"] - 1) > args.within]
    print(f"off by more than {args.within:.0%}: {', '.join(off) or 'none'}")
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
