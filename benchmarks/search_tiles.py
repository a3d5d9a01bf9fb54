"""Which tile of the TPU attention kernel is cheapest on chips that are not there.

Every candidate is compiled for the chip; what the compiler refuses (too much VMEM) is out.
The rest is ranked by the time its schedule implies: per grid step the larger of its copies
at the chip's bandwidth and its products at the chip's peak, the fixed cost of a step, the
first copy, which nothing hides, and the dead slots of the last block of a sequence of
random length (half a block). Times are a model, compilation is not; nothing has run on a
chip. ``jspec/pallas/tiles.py`` holds what was found. Needs libtpu.

  python benchmarks/search_tiles.py --chips v5e
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from rich.table import Table

from jspec import report, roofline, topology
from jspec.pallas import tiles, tpu
from jspec.pallas.tiles import Tile

STEP_SECONDS = 0.35e-6  # of a grid step, as Pallas' documentation says
BATCH, LENGTH = 8, 8192
# name, nodes, heads, kv heads, head size, dtype
SHAPES = {
    "llama-3.1-8b, 32 nodes": (32, 32, 8, 128, jnp.bfloat16),
    "llama-3.1-8b, plain": (1, 32, 8, 128, jnp.bfloat16),
    "head size 64": (16, 32, 8, 64, jnp.bfloat16),
    "head size 256": (16, 16, 8, 256, jnp.bfloat16),
    "float32": (16, 32, 8, 128, jnp.float32),
}


def compiles(mesh, shape, tile: Tile) -> bool:
    nodes, heads, kv_heads, dim, dtype = shape
    here = NamedSharding(mesh, PartitionSpec())

    def array(*sizes, of=dtype):
        return jax.ShapeDtypeStruct(sizes, of, sharding=here)

    own = array(BATCH, nodes, kv_heads, dim)
    call = functools.partial(tpu.block_attention, scale=1.0, tile=tile)
    lowered = jax.jit(call).lower(
        array(BATCH, nodes, heads, dim),
        array(BATCH, kv_heads, dim, LENGTH),
        array(BATCH, kv_heads, LENGTH, dim),
        array(BATCH, of=jnp.int32),
        own,
        own,
        array(BATCH, nodes, nodes, of=jnp.bool_),
    )
    try:
        lowered.compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def seconds(chip: roofline.Chip, shape, tile: Tile) -> float:
    """The time of the schedule; see the module's text."""
    nodes, heads, kv_heads, dim, dtype = shape
    rows = -(-heads // kv_heads * nodes // 16) * 16
    lanes = -(-dim // 128) * 128  # values are stored so wide
    moved = tile.heads * tile.slots * (dim + lanes) * jnp.dtype(dtype).itemsize
    flops = 4.0 * tile.heads * rows * tile.slots * dim
    passes = 6 if dtype == jnp.float32 else 1  # bfloat16 products of a float32 one
    step = max(moved / chip.bandwidth, passes * flops / chip.flops)
    steps = BATCH * (kv_heads // tile.heads) * (LENGTH / tile.slots + 0.5)
    return steps * (step + STEP_SECONDS) + moved / chip.bandwidth


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chips", default=",".join(topology.TPUS))
    parser.add_argument("--slots", default="256,512,1024,2048")
    args = parser.parse_args()
    for name in args.chips.split(","):
        mesh, chip = topology.tpu_mesh(name), roofline.CHIPS[name]
        table = Table(title=f"{chip.name}, batch {BATCH}, {LENGTH} cached: us a layer")
        for head in ("shape", "chosen", "us", "best", "us", "refused"):
            table.add_column(head)
        for label, shape in SHAPES.items():
            nodes, heads, kv_heads, dim, dtype = shape
            widths = [int(w) for w in args.slots.split(",")]
            sizes = itertools.product(widths, (1, 2, 4, 8))
            ranked = sorted((seconds(chip, shape, Tile(*s)), Tile(*s)) for s in sizes)
            # The cheapest that compiles: dearer ones need not be tried.
            refused = 0
            while not compiles(mesh, shape, ranked[refused][1]):
                refused += 1
            best_seconds, best = ranked[refused]
            rows = -(-heads // kv_heads * nodes // 16) * 16
            size = jnp.dtype(dtype).itemsize
            chosen = tiles.tpu(LENGTH, kv_heads, rows, -(-nodes // 16) * 16, dim, size)
            table.add_row(
                label,
                f"{chosen.slots} x {chosen.heads}",
                f"{1e6 * seconds(chip, shape, chosen):.1f}",
                f"{best.slots} x {best.heads}",
                f"{1e6 * best_seconds:.1f}",
                str(refused),
            )
        report.console().print(table)


if __name__ == "__main__":
    main()
