"""``jspec predict``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.table import Table as Grid

from jspec import predict, report, roofline, topology
from jspec.models.presets import PRESETS, preset
from jspec.phases import DRAFTERS, Setting
from jspec.predict import Prediction, Table

PREDICT = """Predicts rounds on a chip that is not there: cost by phase, and the speed-up.

  jspec predict --target llama-3.1-8b --drafter eagle3 --chip v5e --acceptance 0.78,0.75,0.7
  jspec predict --target llama-3.1-8b --drafter eagle3 --chip h100 --batches 1,8,32 --plot p.png
  jspec predict --target llama-3.1-70b --mesh v5p-16 --chains 4 --trees none

For TPUs the phases are compiled where libtpu is installed, and figures are XLA's; for other
chips they are arithmetic over the sizes. The output says which.
"""
_PHASES = ("propose", "update", "score", "accept", "append")


def add_predict(command: argparse.ArgumentParser) -> None:
    """Options of ``jspec predict``."""
    command.set_defaults(run=_predict)
    add = command.add_argument
    add("--target", default="llama-3.1-8b", help=f"one of {', '.join(PRESETS)}")
    add("--drafter", default="eagle3", help=f"one of {', '.join(DRAFTERS)} (eagle3)")
    add(
        "--chip",
        default="v5e",
        help=f"one or several of {', '.join(roofline.CHIPS)}, with commas (v5e)",
    )
    add("--devices", type=int, default=1, metavar="N", help="tensor-parallel (1)")
    add(
        "--mesh",
        metavar="SLICE",
        help="instead of --chip and --devices a cloud slice such as v5e-8 or v5p-16, and "
        "whether its memory suffices",
    )
    add("--batches", default="1", metavar="N,N", help="sequences at once (1)")
    add("--length", type=int, default=2048, metavar="N", help="cached tokens (2048)")
    add("--chains", default="1,2,3,4,5,6,8", metavar="G,G", help="drafts of chains")
    add(
        "--trees",
        default="16/4,32/5,60/6",
        metavar="N/D,N/D",
        help="nodes/depth, or none",
    )
    add(
        "--acceptance",
        metavar="A,A",
        help="chance that a guess is right, by depth; without it no speed-up is told",
    )
    add(
        "--arithmetic",
        action="store_true",
        help="compile nothing, even where libtpu is installed",
    )
    add("--plot", metavar="FILE", help="speed-up against gamma, a line a batch, a PNG")
    add("--json", metavar="FILE", help="append a line a setting")


def _predict(args: argparse.Namespace) -> None:
    # Nothing is run: a libtpu without its TPU need not look for one.
    jax.config.update("jax_platforms", "cpu")
    config = preset(args.target)
    if args.mesh:
        args.chip, args.devices = topology.slice_of(args.mesh)
    settings = _settings(args)
    acceptance = _floats("--acceptance", args.acceptance) if args.acceptance else None
    if args.plot and acceptance is None:
        raise ValueError("--plot shows speed-ups, which need --acceptance")
    tables: dict[tuple[str, int], Table] = {}
    for chip in args.chip.split(","):
        for batch in _ints("--batches", args.batches):
            table = predict.predict(
                config,
                args.drafter,
                chip,
                settings,
                batch=batch,
                length=args.length,
                devices=args.devices,
                acceptance=acceptance,
                compile=False if args.arithmetic else None,
            )
            tables[chip, batch] = table
            _show(args, chip, batch, table)
            if args.json:
                _write(args, chip, batch, table)
    if args.plot:
        plot(args.plot, f"{args.target}, {args.drafter}", tables)
        print(f"the plot is in {args.plot}", file=sys.stderr)


def _settings(args: argparse.Namespace) -> list[Setting]:
    settings = [Setting(g + 1, g) for g in _ints("--chains", args.chains)]
    if args.trees != "none" and args.drafter == "eagle3":
        for tree in args.trees.split(","):
            nodes, _, depth = tree.partition("/")
            settings.append(Setting(*_ints("--trees", f"{nodes},{depth}")))
    return settings


def _ints(option: str, text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise ValueError(f"{option} is {text!r}; need integers from 1, with commas")
    return found


def _floats(option: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} is {text!r}; need numbers with commas") from None


def _show(args: argparse.Namespace, chip: str, batch: int, table: Table) -> None:
    console = report.console()
    where = f"{roofline.CHIPS[chip].name} x {args.devices}"
    title = (
        f"{args.target}, {args.drafter}, {where}, batch {batch}, {args.length} cached"
    )
    console.print(_costs(title, table))
    console.print(_speeds(table))
    console.print(said(chip, table), style="dim")
    if args.mesh:
        console.print(fit(chip, table))
    best = table.best
    if best is not None and best.setting is not None:
        gain = table.speedup(best)
        console.print(f"best setting: {best.setting.name}, {gain:.2f}x", style="bold")
    elif args.acceptance:
        console.print("best setting: none pays; decode plainly", style="bold")


def said(chip: str, table: Table) -> str:
    """Which figures are XLA's and which are arithmetic."""
    if not table.compiled:
        why = (
            "there is no libtpu here"
            if chip in topology.TPUS
            else "nothing is compiled"
        )
        if chip in topology.TPUS and topology.installed():
            why = "nothing was compiled"
        return (
            f"All figures are arithmetic: closed forms over the sizes and the roofline of "
            f"the data sheet, for {why}. None is XLA's."
        )
    device = "half a chip" if chip == "tpu7x" else "one chip"
    kept = f"Compiled for {device}; FLOPs, bytes and memory are XLA's, of one device."
    return (
        f"{kept} XLA's bytes and time count copies within the chip too, up to five times. The "
        f"bound is arithmetic over the sizes and data-sheet peaks; T_draft and T_verify are "
        f"bounds. "
        f"Layers of one kind were compiled once and twice and extrapolated. "
        f"Attention: {table.attention}."
    )


def fit(chip: str, table: Table) -> str:
    """Whether a device holds everything, and how much that is."""
    room = roofline.CHIPS[chip].memory
    verdict = "it fits" if table.memory <= room else "it does NOT fit"
    source = "compiled" if table.compiled else "by arithmetic"
    return (
        f"memory ({source}): at most {table.memory / 1e9:.1f} of {room / 1e9:.0f} GB a device; "
        f"{verdict}"
    )


def _costs(title: str, table: Table) -> Grid:
    grid = Grid(title=title)
    grid.add_column("setting")
    grid.add_column("phase")
    names = ("GFLOP", "MB moved", "GB needed", "XLA ms", "bound ms")
    for name in names:
        grid.add_column(name, justify="right")
    for row in (table.plain, *table.rows):
        name = "plain" if row.setting is None else row.setting.name
        for phase in _PHASES:
            cost = row.costs[phase]
            if not cost.moved:
                continue
            xla = "-" if cost.seconds is None else f"{1e3 * cost.seconds:.3f}"
            grid.add_row(
                name,
                phase,
                f"{cost.flops / 1e9:.1f}",
                f"{cost.moved / 1e6:.1f}",
                f"{cost.memory / 1e9:.2f}",
                xla,
                f"{1e3 * row.bounds[phase]:.3f}",
            )
            name = ""
        grid.add_section()
    return grid


def _speeds(table: Table) -> Grid:
    grid = Grid(caption="times: ms. pays above: the tau at which a round breaks even")
    grid.add_column("setting")
    names = (
        "T_draft",
        "T_verify",
        "over T_decode",
        "pays above",
        "tau",
        "L",
        "speed-up",
    )
    for name in names:
        grid.add_column(name, justify="right")
    plain = table.plain.verify
    grid.add_row(
        "plain", "", f"{1e3 * plain:.3f}", "1.00", "", "1.00", f"{1e3 * plain:.3f}"
    )
    for row in table.rows:
        gain = table.speedup(row)
        cells = ["-"] * 3
        if gain is not None and row.tau is not None:
            cells = [f"{row.tau:.2f}", f"{1e3 * plain / gain:.3f}", f"{gain:.2f}x"]
        grid.add_row(
            row.setting.name if row.setting else "",
            f"{1e3 * row.draft:.3f}",
            f"{1e3 * row.verify:.3f}",
            f"{table.ratio(row):.2f}",
            f"{table.break_even(row):.2f}",
            *cells,
        )
    return grid


def _write(args: argparse.Namespace, chip: str, batch: int, table: Table) -> None:
    shared: dict[str, Any] = dict(
        target=args.target,
        drafter=args.drafter,
        chip=chip,
        devices=args.devices,
        batch=batch,
        length=args.length,
        compiled=table.compiled,
        t_decode_ms=1e3 * table.plain.verify,
    )
    with Path(args.json).open("a", encoding="utf-8") as file:
        for row in table.rows:
            line = shared | _record(table, row)
            file.write(json.dumps(line) + "\n")


def _record(table: Table, row: Prediction) -> dict[str, Any]:
    return dict(
        setting=row.setting.name if row.setting else "plain",
        t_draft_ms=1e3 * row.draft,
        t_verify_ms=1e3 * row.verify,
        verify_over_decode=table.ratio(row),
        tau=row.tau,
        speedup=table.speedup(row),
        memory=row.memory,
        phases={name: dataclasses.asdict(cost) for name, cost in row.costs.items()},
    )


def plot(path: str, title: str, tables: dict[tuple[str, int], Table]) -> None:
    """Speed-up against gamma for every batch, a panel a chip."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    chips = list(dict.fromkeys(chip for chip, _ in tables))
    wide = min(len(chips), 3)
    high = -(-len(chips) // wide)
    figure, axes = pyplot.subplots(
        high,
        wide,
        figsize=(4.2 * wide, 3.4 * high),
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    for panel, chip in zip(axes.flat, chips, strict=False):
        for (name, batch), table in tables.items():
            if name == chip:
                panel.plot(*_line(table), "o-", markersize=4, label=f"batch {batch}")
        panel.axhline(1.0, color="grey", linewidth=0.8)
        panel.set(xlabel="drafts on a chain", title=roofline.CHIPS[chip].name)
    for panel in axes.flat[len(chips) :]:
        panel.axis("off")
    for panel in axes[:, 0]:
        panel.set(ylabel="predicted speed-up")
    axes[0, 0].legend()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _line(table: Table) -> tuple[Sequence[int], Sequence[float]]:
    chains = [
        r for r in table.rows if r.setting and r.setting.nodes == r.setting.depth + 1
    ]
    depths = [r.setting.depth for r in chains if r.setting]
    return depths, [table.speedup(r) or 0.0 for r in chains]
