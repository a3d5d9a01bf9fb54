"""Prompt lookup: tokens for free where the answer repeats the prompt.

    python experiments/ngram.py

decodes the packaged prompts plainly and with prompt lookup, in turn, and prints tau, the
acceptance by depth and the speed-up by category. The gain is on text that is copied
(code, summaries, extraction); a round that finds nothing costs a plain step.
"""

from jspec import Draft, bench, drafters

PICKS = {"latest": drafters.latest, "first": drafters.first}


def main() -> None:
    parser = bench.argument_parser(__doc__.split("\n")[0])
    parser.add_argument("--gamma", default="7", help="longest draft; several: 4,7,12")
    parser.add_argument("--longest", type=int, default=5, help="longest n-gram")
    parser.add_argument("--shortest", type=int, default=3, help="shortest n-gram")
    parser.add_argument("--pick", choices=PICKS, default="latest", help="which match")
    args = parser.parse_args()
    target = bench.start(args)
    methods = []
    for gamma in map(int, args.gamma.split(",")):
        drafter = drafters.ngram(gamma, args.longest, args.shortest, PICKS[args.pick])
        methods.append(bench.Method(f"ngram-{gamma}", Draft(drafter, name="ngram")))
    bench.run(args, target, methods)


if __name__ == "__main__":
    main()
