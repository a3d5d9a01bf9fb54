"""What a tree costs beyond a chain of as many nodes: growing, masking, scoring it.

A drafter without a network (fixed logits stand for its output) grows a dynamic tree, which
the target scores; beside it the target scores a chain of the same width. Both take turns
in one process, and the ratio of the medians is the overhead of trees as such.

    python benchmarks/tree_overhead.py --nodes 32
"""

from __future__ import annotations

import argparse
import functools

import jax
import jax.numpy as jnp

import jspec
from jspec.arguments import add_target
from jspec.compilation import enable_cache
from jspec.drafters import growth
from jspec.sampling import argmax
from jspec.timing import Loop, in_turn
from jspec.types import Block, chain

DRAFT_VOCAB = 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add_target(parser)
    add("--nodes", type=int, default=32, help="of the block, root included (32)")
    add("--depth", type=int, default=6, help="of the tree (6)")
    add("--width", type=int, default=8, help="nodes extended a level (8)")
    add("--context", type=int, default=256, help="tokens cached (256)")
    add("--runs", type=int, default=15, help="timed runs of each (15)")
    args = parser.parse_args()
    enable_cache()
    model = jspec.load(args.target, dtype=args.dtype)
    slots = -(-(args.context + args.nodes) // 64) * 64
    cache = model.target.init_cache(1, slots, model.cache_dtype)
    cache = cache.rewind(jnp.array([args.context], jnp.int32))
    grower = growth.dynamic(args.nodes, args.depth, args.width)
    logits = jax.random.normal(jax.random.key(0), (args.width, DRAFT_VOCAB))

    def loop(step, grower):
        score = Loop(step, (model.target, grower), jax.tree.map(jnp.copy, cache))
        return functools.partial(score.run, (model.params, logits))

    found = in_turn(
        {"chain": loop(_chain, grower), "tree": loop(_tree, grower)}, 4, args.runs
    )
    print(
        f"{args.nodes} nodes, {args.context} tokens cached: chain {found['chain']:.1f} "
        f"ms, tree {found['tree']:.1f} ms, ratio {found['tree'] / found['chain']:.3f}"
    )


def _chain(target, grower, given, cache, zero):
    params, _ = given
    tokens = jnp.ones((1, grower.nodes), jnp.int32) + zero
    out = target.score(params, cache, chain(tokens))
    return cache, argmax(out.logits)


def _tree(target, grower, given, cache, zero):
    params, logits = given
    logits = logits[None] + zero.astype(logits.dtype)

    def extend(at, token, row):
        # Differs from node to node and level to level, as a network's output would.
        return jnp.roll(logits, at + 1, axis=1) + 1e-3 * token[..., None], at + 1

    grown = grower.grow(extend, 0, logits[:, 0], None, None)
    root = jnp.ones((1, 1), jnp.int32)
    block = Block(
        token=jnp.concatenate([root, grown.token], 1),
        parent=jnp.concatenate([root - 2, grown.parent], 1),
        live=jnp.ones((1, grower.nodes), bool),
        vote=jnp.ones((1, grower.nodes), bool),
    )
    out = target.score(params, cache, block)
    return cache, argmax(out.logits)


if __name__ == "__main__":
    main()
