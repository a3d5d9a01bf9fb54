"""Open-loop load: requests arrive at random, whether or not the engine keeps up.

Arrivals are Poisson. For every rate the table has the time to the first token and the
time between tokens, as clients see them (a round's tokens arrive together, so most gaps
inside a round are 0 and the mean is what a reader notices), with and without drafts.

    python experiments/serving.py --drafters ngram eagle3 --rates 0.2 0.5 1 --plot load.png
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence

import numpy as np
from rich.table import Table

from jspec import bench, record, report, verify
from jspec.arguments import add_target
from jspec.compilation import enable_cache
from jspec.models import Model, load
from jspec.prompts import load_prompts
from jspec.serve.engine import Engine
from jspec.serve.request import Full, Piece
from jspec.text import encode


class Clock:
    """Notes when a request's tokens came."""

    def __init__(self, due: float):
        self.due, self.times, self.reason = due, [], None

    def __call__(self, piece: Piece) -> None:
        self.times += [time.monotonic()] * len(piece.tokens)
        self.reason = piece.finish_reason


def play(engine: Engine, prompts, rate: float, count: int, new: int, seed: int) -> dict:
    """One run of ``count`` requests at ``rate`` a second; its numbers."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, count)
    start = time.monotonic()
    due, clocks, refused, at = start + np.cumsum(gaps), [], 0, 0
    while at < count or any(c.reason is None for c in clocks):
        while at < count and time.monotonic() >= due[at]:
            clock = Clock(due[at])
            try:
                engine.submit(
                    prompts[at % len(prompts)], max_new_tokens=new, sink=clock
                )
                clocks.append(clock)
            except Full:
                refused += 1
            at += 1
        if not engine.step():
            time.sleep(max(0.0, min(due[min(at, count - 1)] - time.monotonic(), 0.05)))
    seconds = time.monotonic() - start
    first = np.array([c.times[0] - c.due for c in clocks])
    between = [
        (c.times[-1] - c.times[0]) / (len(c.times) - 1)
        for c in clocks
        if len(c.times) > 1
    ]
    tokens = sum(len(c.times) for c in clocks)
    line = {"rate": rate, "requests": count, "refused": refused}
    line |= {"tokens_per_s": tokens / seconds}
    for name, values in {"ttft": first, "itl": np.array(between)}.items():
        cuts = np.percentile(1e3 * values, (50, 90, 99))
        line |= {f"{name}_p{p}_ms": x for p, x in zip((50, 90, 99), cuts, strict=True)}
    return line


def plot(path: str, lines: list[dict], title: str) -> None:
    """Medians, and the 90th percentile as a thin line, over the rate of arrivals."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 2)
    names = {"ttft": "until the first token, ms", "itl": "between tokens, ms"}
    for axes, (name, label) in zip(panels, names.items(), strict=True):
        for i, drafter in enumerate(dict.fromkeys(line["drafter"] for line in lines)):
            mine = [line for line in lines if line["drafter"] == drafter]
            rates, color = [line["rate"] for line in mine], f"C{i}"
            for share, style in ((50, "o-"), (90, ".:")):
                y = [line[f"{name}_p{share}_ms"] for line in mine]
                text = f"{drafter}, {share}%"
                axes.plot(rates, y, style, color=color, label=text)
        axes.set(xlabel="requests a second", ylabel=label, ylim=(0, None))
    panels[0].legend(fontsize=8)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def show(args: argparse.Namespace) -> None:
    count, new = (6, 12) if args.smoke else (args.requests, args.max_new_tokens)
    rates = args.rates[:1] if args.smoke else args.rates
    sizes = [2] if args.smoke else args.sizes
    model: Model = load(args.target, dtype=args.dtype)
    questions = load_prompts(args.prompts, args.limit)
    ids = encode(
        model.tokenizer, [q.prompt for q in questions], model.config.vocab_size
    )
    prompts = [p for p in ids if len(p) + new < args.context]
    table = Table(
        title=f"{model.name}, up to {sizes[-1]} at once, {count} requests a row, "
        f"{new} new tokens each",
        caption="milliseconds as percentiles over requests; between tokens: a request's "
        "mean",
    )
    columns = ("drafter", "a second", "tokens/s", "first token 50", "90", "99")
    for name in (*columns, "between tokens 50", "90", "99", "refused"):
        table.add_column(name, justify="left" if name == "drafter" else "right")
    lines: list[dict] = []
    with record.lines(args.json) as file:
        for name in ("none", *args.drafters):
            draft = bench.method(name, model, None, args.gamma).draft
            engine = Engine(
                model,
                draft,
                sizes=sizes,
                context=args.context,
                queue=args.queue,
                rule=verify.greedy,
                eos_ids=(),
            )
            engine.warm_up()
            for rate in rates:
                line = play(engine, prompts, rate, count, new, args.seed)
                line |= {"target": model.name, "drafter": name}
                line |= {"sizes": list(sizes), "device": record.device()}
                lines.append(line)
                if file:
                    file.write(json.dumps(line) + "\n")
                    file.flush()
                keys = [f"{k}_p{p}_ms" for k in ("ttft", "itl") for p in (50, 90, 99)]
                cells = [f"{line[k]:.0f}" for k in keys]
                speed = f"{line['tokens_per_s']:.1f}"
                table.add_row(name, f"{rate:g}", speed, *cells, str(line["refused"]))
    report.console().print(table)
    if args.plot:
        plot(args.plot, lines, f"{model.name} on {record.device()}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add_target(parser)
    add(
        "--drafters",
        nargs="+",
        default=["ngram"],
        help="as for jspec serve, folders of heads too (ngram)",
    )
    add("--gamma", type=int, help="tokens drafted a round")
    add("--prompts", metavar="FILE", help="as for jspec bench")
    add("--limit", type=int, help="use so many prompts")
    add("--rates", type=float, nargs="+", default=[0.3, 0.6, 1.2], help="a second")
    add("--requests", type=int, default=24, help="a rate (24)")
    add("--max-new-tokens", type=int, default=48, help="a request (48)")
    add("--sizes", type=int, nargs="+", default=[1, 4, 8], help="batch sizes (1 4 8)")
    add("--context", type=int, default=384, help="tokens of a request (384)")
    add("--queue", type=int, default=64, help="requests that may wait (64)")
    add("--seed", type=int, default=0, help="of the arrivals (0)")
    add("--json", metavar="FILE", help="append a line a row")
    add("--plot", metavar="FILE", help="write a PNG")
    add("--smoke", action="store_true", help="six requests at one rate")
    args = parser.parse_args(argv)
    with bench.one_line_errors() as status:
        enable_cache()
        show(args)
    return status.code


if __name__ == "__main__":
    sys.exit(main())
