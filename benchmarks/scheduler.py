"""How long the scheduler takes to decide, jitted, on the host's device.

python benchmarks/scheduler.py --requests 256 --gamma 7
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import jax.numpy as jnp

from jspec.serve import costs, scheduler

POLICIES = (scheduler.early_stop, scheduler.stale_capacity, scheduler.columns)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--requests", type=int, default=256, help="in the batch (256)")
    add("--gamma", type=int, default=7, help="drafts a request (7)")
    add("--runs", type=int, default=200, help="timed decisions of each policy (200)")
    args = parser.parse_args()
    shape = args.requests, args.gamma
    keys = jax.random.split(jax.random.key(0))
    chance, stale = (jax.random.uniform(k, shape, minval=0.5) for k in keys)
    stale = scheduler.survival(stale)
    active = jnp.ones(args.requests, bool)
    most = args.requests * (args.gamma + 1)
    table = costs.table({1: 1.0, most // 4: 1.1, most // 2: 1.8, most: 3.4})
    for policy in POLICIES:

        @jax.jit
        def decide(chance, stale, active, table, policy=policy):
            return policy(scheduler.survival(chance), stale, active, table)

        given = chance, stale, active, table
        jax.block_until_ready(decide(*given))
        times = []
        for _ in range(args.runs):
            start = time.perf_counter()
            length = jax.block_until_ready(decide(*given))
            times.append(1e3 * (time.perf_counter() - start))
        print(
            f"{policy.__name__:15} {statistics.median(times):.3f} ms for "
            f"{args.requests} requests, {int(length.sum())} of {chance.size} drafts"
        )


if __name__ == "__main__":
    main()
