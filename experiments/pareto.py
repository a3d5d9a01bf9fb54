"""Throughput against speed a user: what a batch size buys, with and without drafts.

Every point is an engine whose slots are all busy with prompts of the same set. A larger
batch serves more tokens in all and fewer to each user; drafting moves the front outward
as long as verifying costs less than it saves. ``adaptive`` drafts where that was
measured to pay.

    python experiments/pareto.py --drafter ngram --batches 1 4 8 --plot pareto.png
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence

from rich.table import Table

from jspec import bench, record, report, verify
from jspec.compilation import enable_cache
from jspec.models import load
from jspec.prompts import load_prompts
from jspec.serve.engine import Engine
from jspec.text import encode


def point(engine: Engine, prompts: list, batch: int, new: int) -> dict:
    """Serves as many requests as there are slots, all at once; what they got."""
    tickets = [
        engine.submit(prompts[i % len(prompts)], max_new_tokens=new)
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


def plot(path: str, lines: list[dict], title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for method in dict.fromkeys(line["method"] for line in lines):
        mine = [line for line in lines if line["method"] == method]
        x = [line["tokens_per_s_user"] for line in mine]
        axes.plot(x, [line["tokens_per_s"] for line in mine], "o-", label=method)
    axes.set(xlabel="tokens/s a user", ylabel="tokens/s in all", title=title)
    axes.legend()
    figure.savefig(path, dpi=120)


def show(args: argparse.Namespace) -> None:
    new = 12 if args.smoke else args.max_new_tokens
    batches = [1, 2] if args.smoke else args.batches
    model = load(args.target)
    questions = load_prompts(args.prompts, args.limit)
    ids = encode(
        model.tokenizer, [q.prompt for q in questions], model.config.vocab_size
    )
    prompts = [p for p in ids if len(p) + new < args.context]
    methods = {"plain": ("none", False), args.drafter: (args.drafter, False)}
    methods["adaptive"] = (args.drafter, True)
    lines: list[dict] = []
    table = Table(title=f"{model.name} on {record.device()}, {new} new tokens each")
    for name in ("method", "batch", "tokens/s", "a user", "tau", "over plain"):
        table.add_column(name, justify="left" if name == "method" else "right")
    with record.lines(args.json) as file:
        for batch in batches:
            first = None
            for method, (drafter, adaptive) in methods.items():
                draft = bench.method(drafter, model, None, args.gamma).draft
                engine = Engine(
                    model,
                    draft,
                    sizes=batch,
                    context=args.context,
                    adaptive=adaptive,
                    rule=verify.greedy,
                )
                engine.warm_up()
                runs = [point(engine, prompts, batch, new) for _ in range(args.runs)]
                best = max(runs, key=lambda run: run["tokens_per_s"])
                line = {"method": method, "batch": batch, "target": model.name, **best}
                lines.append(line)
                first = first or line
                ratio = line["tokens_per_s"] / first["tokens_per_s"]
                if file:
                    file.write(json.dumps(line) + "\n")
                    file.flush()
                numbers = (
                    f"{line[k]:.1f}" for k in ("tokens_per_s", "tokens_per_s_user")
                )
                cells = (*numbers, f"{line['tau']:.2f}", f"{ratio:.2f}x")
                table.add_row(method, str(batch), *cells)
    report.console().print(table)
    if args.plot:
        plot(args.plot, lines, model.name)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--target", default="smollm2-135m", help="a model to load (smollm2-135m)")
    add("--drafter", default="ngram", help="as for jspec bench (ngram)")
    add("--gamma", type=int, help="tokens drafted a round")
    add("--prompts", metavar="FILE", help="as for jspec bench")
    add("--limit", type=int, help="use so many prompts")
    add("--batches", type=int, nargs="+", default=[1, 4, 8], help="(1 4 8)")
    add("--max-new-tokens", type=int, default=48, help="a request (48)")
    add("--context", type=int, default=384, help="tokens of a request (384)")
    add("--runs", type=int, default=2, help="of every point; the best counts (2)")
    add("--json", metavar="FILE", help="append a line a point")
    add("--plot", metavar="FILE", help="write a PNG")
    add("--smoke", action="store_true", help="two batches, twelve tokens")
    args = parser.parse_args(argv)
    with bench.one_line_errors() as status:
        enable_cache()
        show(args)
    return status.code


if __name__ == "__main__":
    sys.exit(main())
