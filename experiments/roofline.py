"""Decode and verify time against block width on this device, beside its roofline.

    python experiments/roofline.py --plot roofline.png

A block of N nodes reads the weights once, so a perfect memory-bound device would verify
N nodes in the time of one. The table shows what this one does.
"""

import argparse
import json

import jax
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

import jspec
from jspec import measure, theory
from jspec.compilation import enable_cache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--widths", default="1,2,4,8,12,16,32", help="block nodes")
    parser.add_argument("--context", type=int, default=256, help="cached tokens")
    parser.add_argument("--plot", help="write a PNG here")
    parser.add_argument("--json", help="append the result to this file")
    parser.add_argument("--smoke", action="store_true", help="three widths, few runs")
    args = parser.parse_args()
    enable_cache()
    model = jspec.load(args.target)
    widths = [int(w) for w in ("1,4,8" if args.smoke else args.widths).split(",")]
    runs = {"repetitions": 3, "runs": 3} if args.smoke else {}
    times = measure.verify_curve(model, widths, context=args.context, **runs)
    bandwidth = measure.copy_bandwidth()
    size = sum(x.nbytes for x in jax.tree.leaves(model.params)) / 1e9
    bound = size / bandwidth * 1e3
    table = Table(title=f"{model.name}, {args.context} tokens cached")
    for column in ("N", "ms", "ms / ms(1)", "memory bound ms", "share of bandwidth"):
        table.add_column(column, justify="right")
    for n, ms in times.items():
        table.add_row(
            str(n),
            f"{ms:.1f}",
            f"{ms / times[widths[0]]:.2f}",
            f"{bound:.1f}",
            f"{100 * bound / ms:.0f}%",
        )
    console = Console()
    console.print(table)
    console.print(
        f"weights {size:.2f} GB, measured read bandwidth {bandwidth:.1f} GB/s"
    )
    if args.plot:
        _plot(args.plot, times, bound, model)
        console.print(f"wrote {args.plot}")
    if args.json:
        with open(args.json, "a", encoding="utf-8") as file:
            record = {"target": model.name, "ms": times, "bandwidth_gb_s": bandwidth}
            file.write(json.dumps(record) + "\n")


def _plot(path: str, times: dict[int, float], bound: float, model) -> None:
    figure, axis = plt.subplots(figsize=(6, 4))
    axis.plot(list(times), list(times.values()), "o-", label="measured")
    axis.axhline(bound, ls="--", label="one read of the weights")
    cost = theory.ModelCost.from_config(model.target.config)
    chip = theory.CHIPS["v5e"]
    curve = theory.verify_curve(cost, chip, list(times), length=256)
    first = next(iter(times.values()))
    axis.plot(list(times), [first * c for c in curve], ":", label="shape on a TPU v5e")
    axis.set(xlabel="block nodes N", ylabel="ms", ylim=(0, None), title=model.name)
    axis.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    main()
