"""A forward over a batch of blocks cut to different sizes: all rows, or the live ones packed.

python benchmarks/packed_rows.py --batch 16 --nodes 8 --packs 1 1.5 2 3 4
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from jspec import record, report, timing
from jspec import sampling as smp
from jspec.arguments import add_target
from jspec.compilation import enable_cache
from jspec.models import load
from jspec.serve.scheduler import PACKS
from jspec.types import Block, Target, chain


def step(target: Target, packed: int | None, given, cache, zero):
    params, block = given
    block = dataclasses.replace(block, token=block.token + zero)
    out = target.score(params, cache, block, packed=packed)
    return cache, smp.argmax(out.logits)


def cut(batch: int, nodes: int, live: int) -> Block:
    """Chains of random lengths with so many live nodes in all."""
    rng, length = np.random.default_rng(0), np.ones(batch, int)
    while length.sum() < live:
        length[rng.choice(np.flatnonzero(length < nodes))] += 1
    alive = np.arange(nodes) < length[:, None]
    return chain(jnp.ones((batch, nodes), jnp.int32), jnp.asarray(alive))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add_target(parser)
    add("--batch", type=int, default=16, help="sequences (16)")
    add("--nodes", type=int, default=8, help="of a block (8)")
    add("--packs", type=float, nargs="+", default=list(PACKS), help="rows a sequence")
    add("--context", type=int, default=256, help="tokens in every cache (256)")
    add("--runs", type=int, default=7, help="timed calls of each, taking turns (7)")
    args = parser.parse_args()
    enable_cache()
    model, batch, nodes = load(args.target, dtype=args.dtype), args.batch, args.nodes
    slots = -(-(args.context + nodes) // 64) * 64
    cache = model.target.init_cache(batch, slots, model.cache_dtype)
    cache = cache.rewind(jnp.full(batch, args.context, jnp.int32))
    counts: list[int | None] = [math.ceil(p * batch) for p in args.packs]
    programs = {}
    for count in [None, *counts]:
        block = cut(batch, nodes, count or batch * nodes)
        loop = timing.Loop(step, (model.target, count), jax.tree.map(jnp.copy, cache))
        programs[count] = functools.partial(loop.run, (model.params, block))
    found = timing.in_turn(programs, 4, args.runs)
    table = Table("live rows", "ms", "of all rows", title=f"{batch} blocks of {nodes}")
    for count, ms in found.items():
        rows = count or batch * nodes
        name = f"{rows}, packed" if count else f"{rows}"
        table.add_row(name, f"{ms:.1f}", f"{ms / found[None]:.2f}")
    report.console().print(table, record.device())


if __name__ == "__main__":
    main()
