"""Lookahead decoding: the target's own n-grams as drafts, no second model at all.

Shows how many tokens a target forward yields for every window of --window. The block has
``(window + guesses) (size - 1)`` rows, which only a machine with arithmetic to spare scores
in the time of one: look at tau on two cores, at the speed on an accelerator. --jacobi adds
plain Jacobi iteration with a chain of that many guesses.

    python experiments/lookahead.py --window 7 15 --limit 12
"""

import argparse
import sys
from collections.abc import Sequence

from jspec import bench
from jspec.drafters import Draft, jacobi, lookahead
from jspec.models import Model


def methods(model: Model, args: argparse.Namespace) -> Sequence[bench.Method]:
    del model
    rule = bench.RULES.get(args.rule)
    windows = args.window[:1] if args.smoke else args.window
    made = {
        f"lookahead W{w} N{args.size} G{args.guesses or w}": lookahead(
            w, args.size, args.guesses or w
        )
        for w in windows
    }
    if args.jacobi:
        made[f"jacobi {args.jacobi}"] = jacobi(args.jacobi)
    return [bench.Method(name, Draft(d, name=name), rule) for name, d in made.items()]


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench.argument_parser(__doc__, {"drafter": "lookahead"})
    parser.add_argument(
        "--window",
        type=int,
        nargs="+",
        default=[7],
        metavar="W",
        help="columns of the window; one method for each (7)",
    )
    parser.add_argument(
        "--size", type=int, default=5, metavar="N", help="tokens of an n-gram (5)"
    )
    parser.add_argument(
        "--guesses",
        type=int,
        metavar="G",
        help="most n-grams verified a round; as many as the window has columns",
    )
    parser.add_argument(
        "--jacobi", type=int, metavar="N", help="add Jacobi iteration with N guesses"
    )
    return bench.main(parser, methods, argv)


if __name__ == "__main__":
    sys.exit(main())
