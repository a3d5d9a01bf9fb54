"""Drafters against plain decoding: same target, prompts, machine and run, in turn.

What every experiment does with its drafter: decode each prompt plainly and with every
method, one after the other, so that all meet the same machine; check that nothing was
lost; measure the terms of ``L = (T_draft + T_verify) / tau``; print the table; append one
JSON line a method.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import jspec
from jspec import measure, stats, verify
from jspec.compilation import enable_cache
from jspec.generation import SLOTS
from jspec.prompts import Question, load_prompts
from jspec.text import encode

TIE = 1e-4  # two best logits closer than this are a tie
_ROOM = 17  # slots kept free for the root and up to 16 drafts


class Method(NamedTuple):
    """A row of the table: a drafter and the rule that judges it (None: the default)."""

    name: str
    draft: jspec.Draft
    rule: jspec.Rule | None = None


@dataclasses.dataclass
class Run:
    """Outputs of one method (or of plain decoding, name "plain") on all prompts so far."""

    name: str
    outputs: list[jspec.Output] = dataclasses.field(default_factory=list)
    categories: list[list[str]] = dataclasses.field(default_factory=list)

    def stats(self, category: str | None = None) -> stats.Stats:
        return stats.merge(
            [
                o.stats
                for o, c in zip(self.outputs, self.categories, strict=True)
                if category in (None, c[0])
            ]
        )


def argument_parser(description: str, **defaults: Any) -> argparse.ArgumentParser:
    """The options that all experiments share; ``defaults`` replaces their defaults."""
    p = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    p.add_argument(
        "--target", default="smollm2-135m", help="alias, folder, file, Hub id"
    )
    p.add_argument("--drafter", default=None, help="a model or folder to draft with")
    p.add_argument("--prompts", help="JSON lines (Spec-Bench form); default: packaged")
    p.add_argument(
        "--limit", type=int, help="prompts, taken from the categories in turn"
    )
    p.add_argument("--max-new-tokens", type=int, default=64)
    p.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--batch", type=int, default=1, help="prompts decoded together")
    p.add_argument(
        "--rule", choices=sorted(verify.LOSSLESS), help="default: best exact"
    )
    p.add_argument("--json", help="append one line a method to this file")
    p.add_argument("--smoke", action="store_true", help="few prompts, few tokens")
    p.set_defaults(**defaults)
    return p


def main(argv: Sequence[str] | None = None) -> None:
    """``jspec bench``: any drafters by name."""
    parser = argument_parser("Compares drafters with plain decoding on real prompts.")
    parser.add_argument(
        "--methods", default="ngram", help="comma-separated: ngram, or models to load"
    )
    parser.add_argument("--gamma", type=int, help="drafts a round")
    args = parser.parse_args(argv)
    target = start(args)
    options = {} if args.gamma is None else {"gamma": args.gamma}
    names = [args.drafter] if args.drafter else args.methods.split(",")
    methods = [Method(n, jspec.load_drafter(n, target, **options)) for n in names]
    run(args, target, methods)


def start(args: argparse.Namespace) -> jspec.Model:
    """Turns the compilation cache on, applies ``--smoke`` and loads the target."""
    enable_cache()
    if args.smoke:
        args.limit = min(args.limit or 6, 6)
        args.max_new_tokens = min(args.max_new_tokens, 24)
    if args.batch < 1:
        raise ValueError(f"batch is {args.batch}; at least 1 prompt must be decoded")
    return jspec.load(args.target)


def run(
    args: argparse.Namespace, target: jspec.Model, methods: Sequence[Method]
) -> list[dict[str, Any]]:
    """Decodes, checks, measures and reports; returns the records that were written.

    An interruption keeps the lines of the methods that were finished, and reports them.
    """
    console = Console()
    questions = load_prompts(args.prompts, args.limit)
    ids, slots = _fit(target, questions, args.max_new_tokens, console)
    batches = _batches(questions, ids, args.batch)
    named = [m._replace(rule=m.rule or _rule(args.rule)) for m in methods]
    records = []
    try:
        for method in named:
            runs = _decode(args, target, method, batches, slots, console)
            record = _record(args, target, method, runs, batches, slots)
            records.append(record)
            append_line(args.json, record)
            _print(console, record, *runs)
    except KeyboardInterrupt:
        console.print(f"interrupted; {len(records)} of {len(named)} methods finished")
        raise
    return records


def append_line(path: str | None, record: dict[str, Any]) -> None:
    """Appends one JSON line and forces it to disk; does nothing without a path."""
    if path is None:
        return
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _rule(name: str | None) -> jspec.Rule | None:
    return None if name is None else verify.LOSSLESS[name]


def _fit(target: jspec.Model, questions: list[Question], new: int, console: Console):
    """Token ids of the prompts that fit (None for others) and one capacity for all."""
    config = target.target.config
    ids: list[list[int] | None] = []
    for question in questions:
        one = encode(target.tokenizer, [question.prompt], config.vocab_size)[0]
        if len(one) + new + _ROOM > config.max_position:
            console.print(f"prompt {question.id} has {len(one)} tokens: skipped")
            ids.append(None)
        else:
            ids.append(one)
    longest = max((len(i) for i in ids if i is not None), default=0)
    if not longest:
        raise ValueError(
            f"no prompt fits the target's context of {config.max_position} tokens with "
            f"{new} new ones"
        )
    whole = -(-(longest + new + _ROOM) // SLOTS) * SLOTS
    return ids, min(whole - _ROOM, config.max_position)


def _batches(questions, ids, size: int):
    """Lists of (question, ids) of one category each, at most ``size`` long."""
    groups: dict[str, list] = {}
    for pair in zip(questions, ids, strict=True):
        if pair[1] is not None:
            groups.setdefault(pair[0].category, []).append(pair)
    return [
        group[i : i + size]
        for group in groups.values()
        for i in range(0, len(group), size)
    ]


def _decode(args, target, method: Method, batches, slots: int, console: Console):
    """Plain decoding and the method, in turn, batch by batch."""
    plain, ours = Run("plain"), Run(method.name)

    def decode(draft, rule, batch, seed=args.seed):
        return jspec.generate(
            target,
            draft,
            [ids for _, ids in batch],
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            seed=seed,
            rule=rule,
            slots=slots,
        )

    sizes = {len(b): b for b in batches}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(f"{method.name}: compiling", total=len(batches))
        for batch in sizes.values():
            decode(None, None, batch)
            decode(method.draft, method.rule, batch)
        progress.update(task, description=method.name)
        for batch in batches:
            plain.outputs.append(decode(None, None, batch))
            ours.outputs.append(decode(method.draft, method.rule, batch))
            for r in (plain, ours):
                r.categories.append([q.category for q, _ in batch])
            progress.advance(task)
    return plain, ours


def _record(args, target, method: Method, runs, batches, slots: int) -> dict[str, Any]:
    """The JSON line of a method; times in milliseconds a round of the batch.

    ``t_verify`` and ``t_round`` are means over rounds with and without a draft.
    """
    plain, ours = runs
    total, base = ours.stats(), plain.stats()
    terms = measure.terms(
        target,
        method.draft,
        [ids for _, ids in batches[0]],
        rule=method.rule,
        slots=slots,
        temperature=args.temperature,
    ).at(total.drafted_rounds / total.rounds)
    shape = method.draft.drafter.shape
    rule = method.rule or _default_rule(args, method)
    first, gap = _divergence(target, plain, ours, batches)
    greedy = args.temperature == 0
    exact = first is None or gap < TIE if greedy else verify.is_lossless(rule)
    return {
        "method": method.name,
        "target": target.name,
        "drafter": method.draft.name,
        "rule": getattr(rule, "__name__", str(rule)),
        "topology": "chain" if shape.nodes == shape.depth + 1 else "tree",
        "gamma": shape.depth,
        "temperature": args.temperature,
        "batch": args.batch,
        "prompts": sum(len(b) for b in batches),
        "new_tokens": total.new_tokens,
        "rounds": total.rounds,
        "tau": total.tau,
        "acceptance_by_depth": list(total.acceptance_by_depth),
        "tokens_per_s": total.tokens_per_s,
        "ar_tokens_per_s": base.tokens_per_s,
        "speedup": total.tokens_per_s / base.tokens_per_s,
        "predicted_speedup": terms.speedup(total.tau),
        "median_speedup": statistics.median(_ratios(plain, ours)),
        "t_ar_ms": terms.ar,
        "t_draft_ms": terms.draft,
        "t_verify_ms": terms.verify,
        "t_round_ms": terms.round,
        "overhead": terms.overhead,
        "lossless": bool(exact),
        "first_divergence": first,
        "max_logit_gap": gap,
        "device": jax.devices()[0].device_kind,
        "dtype": jnp.dtype(target.dtype).name,
        "jax": jax.__version__,
        "seed": args.seed,
        "commit": _commit(),
    }


def _default_rule(args, method: Method) -> jspec.Rule:
    shape = method.draft.drafter.shape
    chain = shape.nodes == shape.depth + 1
    return verify.default_rule(chain, not shape.dense, args.temperature == 0)


def _ratios(plain: Run, ours: Run) -> list[float]:
    """Speed-up of every batch of prompts."""
    return [
        b.stats.tokens_per_s / a.stats.tokens_per_s
        for a, b in zip(plain.outputs, ours.outputs, strict=True)
    ]


def _divergence(target, plain: Run, ours: Run, batches):
    """First differing token (smallest index over all prompts) and the widest gap between
    the two best logits of the plain run at a first difference; (None, 0) if equal."""
    first, gap = None, 0.0
    for a, b, batch in zip(plain.outputs, ours.outputs, batches, strict=True):
        for (_, ids), x, y in zip(batch, a.tokens, b.tokens, strict=True):
            if x == y:
                continue
            pairs = zip(x, y, strict=False)
            at = next(
                (i for i, (s, t) in enumerate(pairs) if s != t), min(len(x), len(y))
            )
            first = at if first is None else min(first, at)
            gap = max(gap, _logit_gap(target, ids + x[:at]))
    return first, gap


def _logit_gap(target: jspec.Model, ids: list[int]) -> float:
    """Difference of the two best next-token logits after ``ids``."""
    cache = target.target.init_cache(1, 1, target.dtype)
    out = target.target.score(
        target.params,
        cache,
        jspec.chain(jnp.array([ids])),
        rows=jnp.array([len(ids) - 1]),
    )
    best = np.sort(np.asarray(out.logits[0, 0]))[-2:]
    return float(best[1] - best[0])


def _commit() -> str | None:
    try:
        return subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _print(console: Console, record: dict[str, Any], plain: Run, ours: Run) -> None:
    table = Table(
        title=f"{record['method']} for {record['target']}, T={record['temperature']}, "
        f"rule {record['rule']}, gamma {record['gamma']}",
        caption="tau: mean emitted tokens per target forward, bonus included",
    )
    for column in (
        "category",
        "prompts",
        "tau",
        "tokens/s",
        "plain tokens/s",
        "speed-up",
    ):
        table.add_column(column, justify="left" if column == "category" else "right")
    for category in [*dict.fromkeys(c[0] for c in ours.categories), None]:
        mine, base = ours.stats(category), plain.stats(category)
        if category is None:
            table.add_section()
        table.add_row(
            category or "all",
            str(len(mine.rows)),
            f"{mine.tau:.2f}",
            f"{mine.tokens_per_s:.1f}",
            f"{base.tokens_per_s:.1f}",
            f"{mine.tokens_per_s / base.tokens_per_s:.2f}x",
        )
    console.print(table)
    depths = " ".join(f"{a:.2f}" for a in record["acceptance_by_depth"])
    console.print(f"acceptance by depth: {depths}")
    console.print(
        f"ms: plain round {record['t_ar_ms']:.1f}, draft {record['t_draft_ms']:.2f}, "
        f"verify {record['t_verify_ms']:.1f}, round {record['t_round_ms']:.1f}; overhead "
        f"{record['overhead']:.3f}; speed-up predicted {record['predicted_speedup']:.2f}x, "
        f"measured {record['speedup']:.2f}x, median {record['median_speedup']:.2f}x"
    )
    if record["first_divergence"] is None:
        difference = "" if record["temperature"] else " (equal to plain greedy)"
    else:
        difference = (
            f" (first difference at token {record['first_divergence']}, logit gap "
            f"{record['max_logit_gap']:.1e})"
        )
    console.print(f"lossless: {record['lossless']}{difference}")
    if ours.stats().proposed == 0:
        print("warning: nothing was ever drafted", file=sys.stderr)
    elif ours.stats().accepted == 0:
        print("warning: no draft was ever accepted", file=sys.stderr)
