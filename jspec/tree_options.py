"""Experiments with trained heads: their options, and the methods those stand for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jspec import bench, draw, report, tree
from jspec.drafters import growth, load_drafter
from jspec.drafters.growth import Grower
from jspec.drafters.loading import HEADS
from jspec.models import Model
from jspec.prompts import load_prompts
from jspec.tree import Topology

TREES = ("dynamic", "static", "chain")


def add_tree_arguments(
    parser: argparse.ArgumentParser,
    kind: str = "dynamic",
    nodes: Sequence[int] = (8,),
    depth: int = 5,
    width: int = 4,
    static: Topology = tree.EAGLE_25,
) -> None:
    """Options that say how a head's guesses are grown into blocks.

    Args:
      parser: gets the options.
      kind, nodes, depth, width: defaults.
      static: the tree that ``--tree static`` stands for.
    """
    parser.set_defaults(static=static)
    add = parser.add_argument
    add(
        "--tree",
        choices=TREES,
        default=kind,
        help="dynamic: the nodes most probable to the head; static: the tree that was "
        f"published with the method; chain: sampled at temperatures above 0 ({kind})",
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
    add(
        "--draw-tree",
        nargs="?",
        const="",
        metavar="PNG",
        help="draw the blocks of three rounds, in the terminal or to a PNG, first",
    )


def growers(args: argparse.Namespace) -> dict[str, Grower]:
    """The growers that the options name, by what tables call them."""
    if args.tree == "chain":
        return {f"chain {args.depth}": growth.chain(args.depth)}
    if args.tree == "static":
        return {f"tree of {args.static.nodes}": growth.ranked(args.static)}
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
    """A method for every grower, all with the head in ``args.drafter``.

    Raises:
      FileNotFoundError: it is one of the repository's heads, which is not there.
    """
    folder = find_head(args.drafter)
    rule = bench.RULES.get(args.rule)
    methods = [
        bench.Method(
            f"{folder.name} {kind}",
            load_drafter(args.drafter, model, grower=grower),
            rule,
        )
        for kind, grower in growers(args).items()
    ]
    if args.draw_tree is not None:
        _draw(model, methods[0], args)
    return methods


def find_head(name: str) -> Path:
    """``name`` as a folder.

    Raises:
      FileNotFoundError: it is one of the repository's heads, which is not there.
    """
    folder = Path(name)
    if folder.parent == HEADS and not folder.is_dir():
        raise FileNotFoundError(
            f"there is no head in {folder}; train one with jspec train, or name one "
            "with --drafter"
        )
    return folder


def _draw(model: Model, method: bench.Method, args: argparse.Namespace) -> None:
    """Draws the first rounds of a method on the first prompt."""
    prompt = load_prompts(args.prompts, 1)[0].prompt
    assert method.draft is not None
    drawn = draw.rounds(
        model,
        method.draft,
        prompt,
        rule=method.rule,
        temperature=args.temperature,
        seed=args.seed,
    )

    def name(token: int) -> str:
        return model.tokenizer.decode([token]) if model.tokenizer else str(token)

    if args.draw_tree:
        draw.image(drawn, name, args.draw_tree)
        return
    for one in drawn:
        report.console().print(draw.terminal(one, name))


def head_parser(
    description: str | None, head: str, limit: int | None
) -> argparse.ArgumentParser:
    """The options of an experiment with ``head``; see ``main``."""
    given = {"drafter": str(HEADS / head), "limit": limit, "dtype": "auto"}
    return bench.argument_parser(description, given)


def main(
    description: str | None,
    head: str,
    argv: Sequence[str] | None = None,
    *,
    limit: int | None = None,
    **defaults: Any,
) -> int:
    """Runs an experiment with a head; returns the exit status.

    Args:
      description: shown by ``--help``.
      head: name of the head in ``checkpoints/`` that is used without ``--drafter``.
      argv: arguments, by default those of the process.
      limit: prompts that are used without ``--limit``; None for all.
      **defaults: of ``add_tree_arguments``.
    """
    parser = head_parser(description, head, limit)
    add_tree_arguments(parser, **defaults)
    return bench.main(parser, tree_methods, argv)
