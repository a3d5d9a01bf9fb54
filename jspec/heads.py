"""Options of the experiments with heads, and the methods they stand for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from jspec import bench, tree
from jspec.drafters import growth, load_drafter
from jspec.drafters.growth import Grower
from jspec.models import Model

TREES = ("dynamic", "static", "chain")


def add_tree_arguments(
    parser: argparse.ArgumentParser,
    kind: str = "dynamic",
    nodes: Sequence[int] = (8,),
    depth: int = 5,
    width: int = 4,
) -> None:
    """Options that say how a head's guesses are grown into blocks."""
    add = parser.add_argument
    add(
        "--tree",
        choices=TREES,
        default=kind,
        help="dynamic: the nodes most probable to the head; static: EAGLE-1's published "
        f"tree; chain: sampled at temperatures above 0 ({kind})",
    )
    add(
        "--nodes",
        type=int,
        nargs="+",
        default=list(nodes),
        metavar="N",
        help="nodes of a dynamic tree, root included; one method for each "
        f"({' '.join(map(str, nodes))})",
    )
    add("--depth", type=int, default=depth, help=f"longest path drafted ({depth})")
    add(
        "--width",
        type=int,
        default=width,
        help=f"nodes extended a level, and guesses of each ({width})",
    )
    add(
        "--least",
        type=float,
        default=0.0,
        metavar="P",
        help="leave out nodes whose path the head holds less probable than P (0)",
    )


def growers(args: argparse.Namespace) -> dict[str, Grower]:
    """The growers that the options name, by what tables call them."""
    if args.tree == "chain":
        return {f"chain {args.depth}": growth.chain(args.depth)}
    if args.tree == "static":
        return {"tree of 26": growth.ranked(tree.EAGLE_25)}
    counts = args.nodes[:1] if args.smoke else args.nodes
    return {
        f"tree of {n}": growth.dynamic(
            n, args.depth, args.width, args.least, _widths(args.least, n)
        )
        for n in counts
    }


def _widths(least: float, nodes: int) -> tuple[int, ...]:
    """Cheaper forwards for rounds that leave nodes out."""
    return tuple(w for w in (1, 4, 8, 16) if w < nodes) if least > 0 else ()


def tree_methods(model: Model, args: argparse.Namespace) -> Sequence[bench.Method]:
    """A method for every grower, all with the head in ``args.drafter``."""
    rule = bench.RULES.get(args.rule)
    name = Path(args.drafter).name
    return [
        bench.Method(
            f"{name} {kind}", load_drafter(args.drafter, model, grower=grower), rule
        )
        for kind, grower in growers(args).items()
    ]
