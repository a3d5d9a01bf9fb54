"""What a block costs: time of one target forward against block width, and the roofline.

Speculation pays because scoring N tokens costs little more than scoring one while
memory is the limit: the weights are read once either way. The table shows what this
device really does, beside the bound of its measured bandwidth and arithmetic. A ratio
of 1.7 at N = 8 means that a round must emit more than 1.7 tokens to gain anything.

    python experiments/roofline.py --plot roofline.png
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
from rich.table import Table

from jspec import bench, measure, record, report, roofline, timing
from jspec.arguments import add_target
from jspec.compilation import enable_cache
from jspec.models import Model, load


def bounds(model: Model, chip: roofline.Chip, widths, context: int) -> dict[int, float]:
    """Milliseconds that a block of every width needs at least."""
    cost = roofline.ModelCost.from_config(
        model.config,
        bytes_per_weight=jnp.dtype(model.dtype).itemsize,
        bytes_per_cache=model.cache_dtype.itemsize,
    )
    steps = {n: roofline.step_cost(cost, rows=n, length=context) for n in widths}
    return {n: 1e3 * roofline.roofline_seconds(*s, chip) for n, s in steps.items()}


def plot(path: str, times: dict, least: dict, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    axes.plot(list(times), list(times.values()), "o-", label="measured")
    axes.plot(list(least), list(least.values()), "s--", label="roofline")
    axes.set(xlabel="block width N", ylabel="ms a forward", ylim=(0, None), title=title)
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def show(args: argparse.Namespace) -> None:
    widths = [1, 4, 8] if args.smoke else sorted({1, *args.widths})
    runs = {"repetitions": 3, "runs": 3} if args.smoke else {}
    model = load(args.target, dtype=args.dtype)
    times = measure.verify_curve(model, widths, context=args.context, **runs)
    chip = timing.measured_chip()
    least = bounds(model, chip, widths, args.context)
    table = Table(
        title=f"{model.name} on {record.device()}, {args.context} tokens cached",
        caption=f"measured: {chip.bandwidth / 1e9:.1f} GB/s read, "
        f"{chip.flops / 1e9:.0f} GFLOP/s in float32",
    )
    for name in ("N", "ms", "over N = 1", "roofline ms", "share of roofline"):
        table.add_column(name, justify="right")
    for n, ms in times.items():
        share, ratio = f"{100 * least[n] / ms:.0f}%", f"{ms / times[1]:.2f}"
        table.add_row(str(n), f"{ms:.2f}", ratio, f"{least[n]:.2f}", share)
    report.console().print(table)
    if args.plot:
        plot(args.plot, times, least, model.name)
    if args.json:
        line = {"target": model.name, "context": args.context, "ms": times}
        line |= {"roofline_ms": least, "device": record.device()}
        line |= {"bandwidth": chip.bandwidth, "flops": chip.flops}
        with Path(args.json).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add_target(parser)
    add("--widths", type=int, nargs="+", default=[1, 2, 4, 6, 8, 12, 16, 24, 32])
    add("--context", type=int, default=256, help="tokens in the cache (256)")
    add("--plot", metavar="FILE", help="write a PNG")
    add("--json", metavar="FILE", help="append a line")
    add("--smoke", action="store_true", help="three widths, few runs")
    args = parser.parse_args(argv)
    with bench.one_line_errors() as status:
        enable_cache()
        show(args)
    return status.code


if __name__ == "__main__":
    sys.exit(main())
