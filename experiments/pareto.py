"""Throughput against speed a user: what a batch size buys, with and without drafts.

Every point is an engine whose slots are all busy with prompts of the same set; those of a
batch size and a drafter run in turn with plain decoding, and end after as many tokens
whatever they say. A larger batch serves more tokens in all and fewer to each user; drafting
moves the front outward as long as verifying costs less than it saves. ``adaptive`` drafts
where that was measured to pay; ``scheduled`` cuts chains where the batch has no use for the
rest, which needs a drafter that draws from a law, and so a temperature. With ``--chip``
nothing is run: points are bounds of ``jspec.predict``, and ``best`` is the best setting at
each size.

    python experiments/pareto.py --drafters ngram eagle3 --batches 1 4 8 --plot pareto.png
    python experiments/pareto.py --chip v5e --target llama-3.1-8b --drafters eagle3 \\
        --batches 1 2 4 8 16 32 64 --acceptance 0.75 0.72 0.7 --plot pareto_v5e.png
"""

import argparse
import ctypes
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence

import jax
from rich.table import Table

from jspec import bench, predict, record, report, roofline, verify
from jspec.arguments import add_target
from jspec.compilation import enable_cache
from jspec.drafters.draft import Draft
from jspec.models import Model, load
from jspec.models.presets import preset
from jspec.phases import Setting
from jspec.prompts import load_prompts
from jspec.serve.engine import Engine
from jspec.serve.scheduler import schedule_here
from jspec.text import encode


def point(engine: Engine, prompts: list, batch: int, **options) -> dict:
    """Serves as many requests as there are slots, all at once; what they got."""
    tickets = [
        engine.submit(prompts[i % len(prompts)], seed=i, **options)
        for i in range(batch)
    ]
    while not all(t.tokens for t in tickets):  # prefill is not part of it
        engine.step()
    start, already = time.perf_counter(), sum(len(t.tokens) for t in tickets)
    results = engine.run(tickets)
    seconds = time.perf_counter() - start
    emitted = sum(len(r.tokens) for r in results)
    counts = [r.stats for r in results]
    return {
        "tokens_per_s": (emitted - already) / seconds,
        "tokens_per_s_user": (emitted - already) / seconds / batch,
        "tau": sum(c.new_tokens for c in counts) / sum(c.rounds for c in counts),
    }


def methods(
    name: str, args: argparse.Namespace, model: Model, batch: int
) -> Iterator[tuple[str, Draft | None, bool]]:
    """Name, drafter and whether the engine is adaptive, for one kind of drafter."""
    yield "plain", None, False
    draft = bench.method(name, model, None, args.gamma).draft
    yield name, draft, False
    yield f"{name}, adaptive", draft, True
    if draft is not None and draft.drafter.shape.dense and args.temperature:
        scheduled = schedule_here(draft, model, batch, temperature=args.temperature)
        yield f"{name}, scheduled", scheduled, False


def release_when_freed(least: int = 1 << 20) -> None:
    """Has glibc return arrays of so many bytes to the system as soon as they are freed.

    Otherwise it learns from the first caches that are freed to keep such arrays in its
    heaps, which grow apart: with two engines of 64 slots to 6.9 GB instead of 3.7.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # there is none on macOS
        mallopt(-3, least)  # M_MMAP_THRESHOLD


def measured(args: argparse.Namespace) -> Iterator[dict]:
    """A line for every batch size and method; plain decoding has one a drafter."""
    model = load(args.target, dtype=args.dtype)
    questions = load_prompts(args.prompts, args.limit)
    ids = encode(
        model.tokenizer, [q.prompt for q in questions], model.config.vocab_size
    )
    new = args.max_new_tokens
    prompts = [p for p in ids if len(p) + new < args.context]
    rule = verify.coupled if args.temperature else verify.greedy
    options = dict(max_new_tokens=new, temperature=args.temperature)
    for batch, drafter in itertools.product(args.batches, args.drafters):
        shape = dict(sizes=batch, context=args.context, rule=rule, eos_ids=())
        engines = {
            name: Engine(model, draft, adaptive=adaptive, **shape)
            for name, draft, adaptive in methods(drafter, args, model, batch)
        }
        for engine in engines.values():
            engine.warm_up()
        runs = [
            {name: point(e, prompts, batch, **options) for name, e in engines.items()}
            for _ in range(args.runs)
        ]
        for name in engines:
            best = max((run[name] for run in runs), key=lambda p: p["tokens_per_s"])
            yield {"method": name, "batch": batch, "device": record.device(), **best}
        del engines, engine
        jax.clear_caches()  # more engines would use up a process's memory maps


def predicted(args: argparse.Namespace) -> Iterator[dict]:
    """The same of a chip that need not be there."""
    config = preset(args.target)
    device = f"{roofline.CHIPS[args.chip].name} x {args.devices}"
    settings = [Setting(g + 1, g) for g in range(1, 8)]
    wanted = args.gamma or 4
    for batch in args.batches:
        for name in args.drafters:
            table = predict.predict(
                config,
                name,
                args.chip,
                settings,
                batch=batch,
                length=args.context,
                devices=args.devices,
                acceptance=args.acceptance,
                compile=False,
            )
            fixed = next(r for r in table.rows if r.setting == settings[wanted - 1])
            best = table.best or table.plain
            for method, row in (
                ("plain", table.plain),
                (f"{name}, {wanted} drafts", fixed),
                (f"{name}, best", best),
            ):
                if method == "plain" and name != args.drafters[0]:
                    continue
                tau = row.tau or 1.0
                each = tau / (row.verify + (0.0 if row.setting is None else row.draft))
                line = {"method": method, "batch": batch, "device": device, "tau": tau}
                yield line | {"tokens_per_s": batch * each, "tokens_per_s_user": each}


def plot(path: str, lines: list[dict], title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for method in dict.fromkeys(line["method"] for line in lines):
        mine = [line for line in lines if line["method"] == method]
        mine.sort(key=lambda line: (line["batch"], line["tokens_per_s"]))
        best = {line["batch"]: line for line in mine}  # plain decoding has several
        x = [line["tokens_per_s_user"] for line in best.values()]
        y = [line["tokens_per_s"] for line in best.values()]
        axes.plot(x, y, "o-", label=method)
    axes.set(xlabel="tokens/s a user", ylabel="tokens/s in all", title=title)
    axes.legend()
    figure.savefig(path, dpi=120)


def show(args: argparse.Namespace) -> None:
    if args.smoke:
        args.max_new_tokens, args.batches, args.runs = 12, [1, 2], 1
    if args.chip and not args.acceptance:
        raise ValueError("--chip needs --acceptance, the chance of a guess by depth")
    lines: list[dict] = []
    table = Table()
    for name in ("method", "batch", "tokens/s", "a user", "tau", "over plain"):
        table.add_column(name, justify="left" if name == "method" else "right")
    with record.lines(args.json) as file:
        for line in (predicted if args.chip else measured)(args):
            lines.append(line)
            if file:
                about = {"target": args.target, "temperature": args.temperature}
                file.write(json.dumps(line | about) + "\n")
                file.flush()
            plain = next(p for p in reversed(lines) if p["method"] == "plain")
            ratio = line["tokens_per_s"] / plain["tokens_per_s"]
            numbers = (f"{line[k]:.1f}" for k in ("tokens_per_s", "tokens_per_s_user"))
            cells = (*numbers, f"{line['tau']:.2f}", f"{ratio:.2f}x")
            table.add_row(line["method"], str(line["batch"]), *cells)
    table.title = f"{args.target} on {lines[-1]['device']}"
    report.console().print(table)
    if args.plot:
        plot(args.plot, lines, table.title)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add_target(parser)
    add(
        "--drafters",
        nargs="+",
        default=["ngram", "eagle3"],
        help="as for jspec serve, folders of heads too (ngram eagle3)",
    )
    add("--gamma", type=int, help="tokens drafted a round")
    add("--prompts", metavar="FILE", help="as for jspec bench")
    add("--limit", type=int, help="use so many prompts")
    add("--batches", type=int, nargs="+", default=[1, 4, 8], help="(1 4 8)")
    add("--max-new-tokens", type=int, default=48, help="a request (48)")
    add("--temperature", type=float, default=0.0, help="0 is greedy (0)")
    add("--context", type=int, default=384, help="tokens of a request (384)")
    add("--runs", type=int, default=2, help="of every point; the best counts (2)")
    add("--chip", choices=roofline.CHIPS, help="predict for this chip, run nothing")
    add("--devices", type=int, default=1, help="chips it is split over (1)")
    add("--acceptance", type=float, nargs="+", help="by depth, with --chip")
    add("--json", metavar="FILE", help="append a line a point")
    add("--plot", metavar="FILE", help="write a PNG")
    add("--smoke", action="store_true", help="two batches, twelve tokens")
    args = parser.parse_args(argv)
    with bench.one_line_errors() as status:
        enable_cache()
        release_when_freed()
        show(args)
    return status.code


if __name__ == "__main__":
    sys.exit(main())
