"""Experiments with block-diffusion drafters: their options and what those stand for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from jspec import bench
from jspec.drafters import load_drafter
from jspec.models import Model
from jspec.serve.scheduler import first, schedule, schedule_here
from jspec.tree_options import find_head, head_parser


def add_block_arguments(
    parser: argparse.ArgumentParser, least: Sequence[float] = (0.0,)
) -> None:
    """Options that say how blocks are drafted.

    Args:
      parser: gets the options.
      least: default thresholds of confidence.
    """
    add = parser.add_argument
    add(
        "--gamma",
        type=int,
        nargs="+",
        metavar="N",
        help="drafts a round; one method for each (all that a block holds)",
    )
    add(
        "--least",
        type=float,
        nargs="+",
        default=list(least),
        metavar="P",
        help="verify drafts up to the first with less confidence; one method for each "
        f"({' '.join(map(str, least))})",
    )
    add(
        "--schedule",
        action="store_true",
        help="also a method whose blocks are cut where the batch has no use for the rest, "
        "by costs measured first, and one that verifies a single draft of each",
    )
    add("--rows", type=int, metavar="N", help="rows of the block that are computed")
    add(
        "--point",
        action="store_true",
        help="draft the best guesses; their law is a point mass",
    )


def block_methods(model: Model, args: argparse.Namespace) -> Sequence[bench.Method]:
    """A method for every number of drafts and threshold, with the drafter of the options.

    Raises:
      FileNotFoundError: it is one of the repository's heads, which is not there.
    """
    folder, rule = find_head(args.drafter), bench.RULES.get(args.rule)
    options = {"dense": not args.point}
    if args.rows is not None:
        options["rows"] = args.rows
    methods = []
    for gamma in args.gamma or [None]:
        for least in args.least:
            draft = load_drafter(folder, model, gamma=gamma, least=least, **options)
            name = f"{folder.name} {draft.drafter.shape.depth}"
            if least > 0:
                name += f" above {least:g}"
            methods.append(bench.Method(name, draft, rule))
        if args.schedule:
            draft = load_drafter(folder, model, gamma=gamma, **options)
            best = schedule_here(draft, model, args.batch, temperature=args.temperature)
            one = schedule(
                draft,
                best.params.table,
                policy=first(1),
                packs=best.drafter.shape.packs,
            )
            name = f"{folder.name} {draft.drafter.shape.depth}"
            methods.append(bench.Method(f"{name} scheduled", best, rule))
            methods.append(bench.Method(f"{name} verify one", one, rule))
    return methods[:2] if args.smoke else methods


def main(
    description: str | None,
    head: str,
    argv: Sequence[str] | None = None,
    *,
    limit: int | None = None,
    least: Sequence[float] = (0.0,),
) -> int:
    """Runs an experiment with a block-diffusion drafter; returns the exit status.

    Arguments as of ``tree_options.main``; ``least`` as of ``add_block_arguments``.
    """
    parser = head_parser(description, head, limit)
    add_block_arguments(parser, least)
    return bench.main(parser, block_methods, argv)
