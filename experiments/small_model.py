"""A small language model drafts for a large one (Leviathan et al., Chen et al.).

--drafter takes any model with the target's tokens. Without it the drafter is the first
--layers layers of the target under the target's own head. Nobody has trained those to
predict anything, so few of their guesses are kept and decoding becomes slower: it shows
the cost of a draft, that the output is the target's all the same, and how far the
measured terms predict the speed. Expect a gain only from a model trained for the job.

    python experiments/small_model.py --gamma 2 4 --layers 3
    python experiments/small_model.py --target big-model --drafter small-model
"""

import argparse
import sys
from collections.abc import Sequence

from jspec import bench
from jspec.drafters import first_layers, load_drafter
from jspec.models import Model, load

OWN_LAYERS = "first-layers"


def methods(model: Model, args: argparse.Namespace) -> Sequence[bench.Method]:
    if args.drafter == OWN_LAYERS:
        small = first_layers(model, args.layers)
    else:
        small = load(args.drafter, dtype=model.dtype)
    rule = bench.RULES.get(args.rule)
    gammas = args.gamma[:1] if args.smoke else args.gamma
    return [
        bench.Method(
            f"{small.name} gamma {gamma}", load_drafter(small, model, gamma=gamma), rule
        )
        for gamma in gammas
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench.argument_parser(__doc__, {"drafter": OWN_LAYERS})
    parser.add_argument(
        "--gamma",
        type=int,
        nargs="+",
        default=[4],
        metavar="N",
        help="tokens drafted a round; one method for each (4)",
    )
    parser.add_argument(
        "--layers",
        type=int,
        default=3,
        metavar="N",
        help=f"layers of the target that --drafter {OWN_LAYERS} uses (3)",
    )
    return bench.main(parser, methods, argv)


if __name__ == "__main__":
    sys.exit(main())
