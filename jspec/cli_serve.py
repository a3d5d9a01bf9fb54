"""``jspec serve``, and the cost table of ``jspec bench``."""

from __future__ import annotations

import argparse
import os
import sys

from jspec import bench
from jspec.arguments import add_target
from jspec.models import load
from jspec.serve import costs

SERVE = """Answers over HTTP as the OpenAI API does: /v1/completions, /v1/chat/completions.

  jspec serve --target smollm2-135m --draft ngram
  jspec serve --draft eagle3 --gamma 4 --sizes 1,4,8

  curl localhost:8000/v1/completions -d '{"prompt": "Once", "max_tokens": 32}'
"""


def add_serve(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run=_serve)
    add = command.add_argument
    add_target(command)
    add(
        "--draft",
        default="ngram",
        metavar="DRAFTER",
        help="ngram, none, eagle3 or another head in checkpoints/, a folder with a head, "
        "or a model (ngram)",
    )
    add("--gamma", type=int, metavar="N", help="tokens drafted a round")
    add(
        "--rule",
        default="coupled",
        choices=sorted(bench.RULES),
        help="of requests that sample; with coupled a seed always gives the same text",
    )
    add(
        "--sizes",
        default="1,4,8",
        metavar="N,N",
        help="batch sizes with programs of their own; the last is how many requests "
        "decode at once (1,4,8)",
    )
    add(
        "--context",
        type=int,
        default=1024,
        metavar="N",
        help="tokens of a request, prompt and new ones (1024)",
    )
    add("--queue", type=int, default=64, metavar="N", help="requests that wait (64)")
    add(
        "--prefixes",
        type=int,
        default=4,
        metavar="N",
        help="prompts whose caches are kept, for prompts that begin alike (4)",
    )
    add("--max-tokens", type=int, default=512, metavar="N", help="most new ones (512)")
    add("--max-body", type=int, default=1 << 20, metavar="BYTES", help="(1048576)")
    add("--no-adaptive", action="store_true", help="draft even where it does not pay")
    add("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    add("--port", type=int, default=8000, help="(8000)")
    add(
        "--api-key",
        default=os.environ.get("JSPEC_API_KEY"),
        help="clients must send it; by default $JSPEC_API_KEY, else nobody needs one",
    )


def _serve(args: argparse.Namespace) -> None:
    try:
        import uvicorn

        from jspec.serve.engine import Engine
        from jspec.serve.server import Limits, Server
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"serving needs {error.name}: pip install 'jspec[serve]'"
        ) from error
    try:
        sizes = [int(n) for n in args.sizes.split(",")]
    except ValueError as error:
        raise ValueError(
            f"sizes are {args.sizes!r}; give numbers like 1,4,8"
        ) from error
    model = load(args.target, dtype=args.dtype)
    method = bench.method(args.draft, model, None, args.gamma)
    engine = Engine(
        model,
        method.draft,
        sizes=sizes,
        context=args.context,
        queue=args.queue,
        prefixes=args.prefixes,
        rule=bench.RULES[args.rule],
        log_prob=True,
        adaptive=not args.no_adaptive,
    )
    print("compiling and measuring ...", file=sys.stderr, flush=True)
    engine.warm_up()
    limits = Limits(body=args.max_body, tokens=args.max_tokens)
    server = Server(engine, model.name, args.api_key or None, limits)
    uvicorn.run(server.app, host=args.host, port=args.port, log_level="info")


def write_cost_table(args: argparse.Namespace) -> None:
    """Measures a target forward over block widths and writes a table for the scheduler.

    Raises:
      ValueError: ``--gamma`` below 1.  OSError: the file cannot be written.
    """
    gamma = 7 if args.gamma is None else args.gamma
    if gamma < 1:
        raise ValueError(f"gamma is {gamma}; a table needs at least 1 draft")
    widths = [1, gamma + 1] if args.smoke else range(1, gamma + 2)
    model = load(args.target, dtype=args.dtype)
    runs = 2 if args.smoke else 5
    found = costs.measured(model, batch=args.batch, widths=widths, runs=runs)
    costs.save(args.cost_table, found, target=model.name, batch=args.batch, context=256)
    for rows, seconds in found.items():
        print(f"{rows:5} rows  {1e3 * seconds:8.2f} ms")
