"""Prompt lookup: drafts copied from the text itself, no second model at all.

Shows, for every draft length of --gamma, how many drafts are kept in each kind of text
and what that gains over plain decoding. It pays where the answer repeats the prompt or
itself (summaries, code, rewriting) and costs little elsewhere, since a round without a
match is a plain step.

    python experiments/ngram.py --gamma 3 7 15 --limit 12
"""

import argparse
import sys
from collections.abc import Sequence

from jspec import bench
from jspec.drafters import Draft, first, latest, ngram
from jspec.models import Model

PICKS = {"latest": latest, "first": first}


def methods(model: Model, args: argparse.Namespace) -> Sequence[bench.Method]:
    gammas = args.gamma[:1] if args.smoke else args.gamma
    if args.drafter != "ngram":  # for comparison
        return [bench.method(args.drafter, model, args.rule, n) for n in gammas]
    rule, pick = bench.RULES.get(args.rule), PICKS[args.pick]
    return [
        bench.Method(
            f"ngram gamma {gamma}",
            Draft(ngram(gamma, args.longest, args.shortest, pick), name="ngram"),
            rule,
        )
        for gamma in gammas
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench.argument_parser(__doc__)
    parser.add_argument(
        "--gamma",
        type=int,
        nargs="+",
        default=[7],
        metavar="N",
        help="most tokens drafted a round; one method for each (7)",
    )
    parser.add_argument("--longest", type=int, default=5, help="longest n-gram (5)")
    parser.add_argument("--shortest", type=int, default=3, help="shortest n-gram (3)")
    parser.add_argument(
        "--pick", choices=PICKS, default="latest", help="which match to copy (latest)"
    )
    return bench.main(parser, methods, argv)


if __name__ == "__main__":
    sys.exit(main())
