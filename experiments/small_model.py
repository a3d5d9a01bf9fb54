"""An independent small language model as the drafter, judged by its own law.

    python experiments/small_model.py --drafter FOLDER

Without ``--drafter`` the target's own first layers serve as the small model. They were
never trained to end there, so next to nothing is accepted: that run shows what drafting
costs, not what it gains.
"""

import dataclasses

import jspec
from jspec import bench
from jspec.models import transformer


def first_layers(model: jspec.Model, count: int) -> jspec.Model:
    """The model made of the first ``count`` layers, the final norm and the head."""
    config = model.target.config
    if not 1 <= count <= config.layers:
        raise ValueError(f"layers is {count}; {model.name} has {config.layers}")
    short = dataclasses.replace(
        config,
        layers=count,
        windows=config.windows[:count],
        ropes=config.ropes[:count],
    )
    params = dataclasses.replace(model.params, layers=model.params.layers[:count])
    return dataclasses.replace(
        model,
        name=f"{model.name}, first {count} layers",
        target=transformer.target(short),
        params=params,
    )


def main() -> None:
    parser = bench.argument_parser(__doc__.split("\n")[0])
    parser.add_argument("--gamma", type=int, default=3, help="drafts a round")
    parser.add_argument("--layers", type=int, default=6, help="without --drafter")
    args = parser.parse_args()
    target = bench.start(args)
    small = args.drafter or first_layers(target, args.layers)
    draft = jspec.load_drafter(small, target, gamma=args.gamma)
    bench.run(args, target, [bench.Method("small model", draft)])


if __name__ == "__main__":
    main()
