"""What the engine's host loop adds to a round, streaming and detokenising included.

The same batch is decoded by the engine and by one compiled loop that never returns to the
host between rounds, in turn; both emit the same tokens.

    python benchmarks/host_overhead.py --batch 8 --rounds 24
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import jax.numpy as jnp

import jspec
from jspec import verify
from jspec.arguments import add_target
from jspec.compilation import enable_cache
from jspec.prompts import load_prompts
from jspec.serve.engine import Engine


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add_target(parser)
    add("--batch", type=int, default=8, help="requests (8)")
    add("--rounds", type=int, default=24, help="timed in each run (24)")
    add("--runs", type=int, default=5, help="of both, in turn (5)")
    args = parser.parse_args()
    enable_cache()
    model = jspec.load(args.target, dtype=args.dtype)
    prompts = [q.prompt for q in load_prompts(limit=args.batch)]
    prompts = [prompts[i % len(prompts)] for i in range(args.batch)]
    # One token more is emitted by the round that the engine is warmed up with.
    new, context = args.rounds + 2, 384
    engine = Engine(
        model, None, sizes=args.batch, context=context, rule=verify.greedy, eos_ids=()
    )
    engine.warm_up()
    request = jspec.prepare(
        model, None, prompts, max_new_tokens=new, slots=context, eos_ids=()
    )
    found: dict[str, list[float]] = {"engine": [], "loop": []}
    for _ in range(args.runs):
        tickets = [
            engine.submit(p, max_new_tokens=new, sink=lambda piece: None)
            for p in prompts
        ]
        while not all(t.tokens for t in tickets):
            engine.step()
        before, start = len(tickets[0].tokens), time.perf_counter()
        while len(tickets[0].tokens) < before + args.rounds - 1:
            engine.step()
        seconds = time.perf_counter() - start
        found["engine"].append(seconds / (len(tickets[0].tokens) - before))
        engine.run(tickets)

        state = jax.block_until_ready(request.run(request.prefill(), jnp.int32(1)))
        start = time.perf_counter()
        jax.block_until_ready(request.run(state, jnp.int32(args.rounds)))
        found["loop"].append((time.perf_counter() - start) / args.rounds)
    median = {name: 1e3 * statistics.median(t) for name, t in found.items()}
    print(
        f"batch {args.batch}: {median['engine']:.2f} ms a round in the engine, "
        f"{median['loop']:.2f} in one program: "
        f"{100 * (median['engine'] / median['loop'] - 1):+.1f}%"
    )


if __name__ == "__main__":
    main()
