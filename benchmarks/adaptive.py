"""The adaptive engine against plain decoding, batch size by batch size.

Both serve the same prompts in turn, first one first, then the other, so that they see the
same machine; what counts is the median ratio of such pairs, for single runs are held up. It
may be above 1 by the budget of ``jspec.serve.adaptive``, and falls below it where drafts pay.

    python benchmarks/adaptive.py --drafter eagle3 --batches 1 2 4 8
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import jspec
from jspec import bench, verify
from jspec.arguments import add_target
from jspec.compilation import enable_cache
from jspec.prompts import load_prompts
from jspec.serve.engine import Engine


def seconds(engine: Engine, prompts: Sequence[str], new: int) -> tuple[float, float]:
    """Of a batch of requests without their prefill, and its share of drafted rounds."""
    tickets = [engine.submit(p, max_new_tokens=new) for p in prompts]
    while not all(t.tokens for t in tickets):
        engine.step()
    start = time.perf_counter()
    counts = [r.stats for r in engine.run(tickets)]
    took = time.perf_counter() - start
    return took, sum(c.drafted_rounds for c in counts) / sum(c.rounds for c in counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add_target(parser)
    add("--drafter", default="eagle3", help="as for jspec serve (eagle3)")
    add("--gamma", type=int, help="tokens drafted a round")
    add("--batches", type=int, nargs="+", default=[1, 2, 4, 8], help="(1 2 4 8)")
    add("--max-new-tokens", type=int, default=40, help="a request (40)")
    add("--context", type=int, default=384, help="tokens of a request (384)")
    add("--runs", type=int, default=10, help="of both, in turn (10)")
    args = parser.parse_args()
    enable_cache()
    model = jspec.load(args.target, dtype=args.dtype)
    draft = bench.method(args.drafter, model, None, args.gamma).draft
    options = dict(context=args.context, rule=verify.greedy, eos_ids=())
    for batch in args.batches:
        prompts = [q.prompt for q in load_prompts(limit=batch)]
        prompts = [prompts[i % len(prompts)] for i in range(batch)]
        plain, adaptive = (
            Engine(model, d, sizes=batch, **options) for d in (None, draft)
        )
        for engine in (plain, adaptive):
            engine.warm_up()
            seconds(engine, prompts, args.max_new_tokens)
        found = {adaptive: [], plain: []}
        for run in range(args.runs):
            pair = (adaptive, plain) if run % 2 else (plain, adaptive)
            for engine in pair:
                found[engine].append(seconds(engine, prompts, args.max_new_tokens))
        ours, theirs = ([took for took, _ in found[e]] for e in (adaptive, plain))
        pairs = [a / b for a, b in zip(ours, theirs, strict=True)]
        share = sum(share for _, share in found[adaptive]) / args.runs
        cost = adaptive.costs[batch]
        print(
            f"batch {batch}: adaptive / plain {statistics.median(pairs):.3f} (median of "
            f"{args.runs} pairs), {sum(ours) / sum(theirs):.3f} of all time, "
            f"{min(ours) / min(theirs):.3f} of the fastest runs; drafted in "
            f"{share:.0%} of the rounds; a round takes "
            f"{1e3 * plain.costs[batch].plain:.1f} ms plain, {1e3 * cost.plain:.1f} "
            f"paused, {1e3 * cost.drafted:.1f} drafted, resuming {1e3 * cost.resume:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
