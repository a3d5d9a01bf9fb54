"""The TPU kernel compiled for chips that are not there. Runs where libtpu is installed."""

import jax.numpy as jnp
import numpy as np
import pytest
from attention_programs import MODELS, compiled, tpu_programs

from jspec import topology
from jspec.pallas import tiles, tpu

CHIPS = sorted(topology.TPUS)
needs_libtpu = pytest.mark.skipif(not topology.installed(), reason="needs libtpu")


@needs_libtpu
@pytest.mark.parametrize("program", tpu_programs())
@pytest.mark.parametrize("chip", CHIPS)
def test_the_supported_table_compiles(chip, program):
    shapes = tpu_programs()[program]
    text = compiled(topology.tpu_mesh(chip), shapes, "tpu").as_text()
    assert text.count("tpu_custom_call") == len(shapes)


@needs_libtpu
@pytest.mark.parametrize("chip", CHIPS)
def test_a_full_cache_is_read_once(chip):
    shape = MODELS[0]
    program = compiled(topology.tpu_mesh(chip), [shape], "tpu")
    rows = 2 * shape.batch * shape.kv_heads * shape.slots
    live = rows * shape.dim * jnp.dtype(shape.dtype).itemsize
    assert program.cost_analysis()["bytes accessed"] <= 1.1 * live
    # No second copy of the cache, in another layout or padded.
    assert program.memory_analysis().temp_size_in_bytes < 0.05 * live


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_dead_blocks_are_not_copied(share):
    """At one capacity the traffic follows the lengths, ragged or not."""
    slots, kv_heads, dim, size = 8192, 8, 128, 2
    tile = tiles.tpu(slots, kv_heads, rows=128, keys=32, dim=dim, size=size)
    length = np.full(8, int(share * slots), np.int32)
    length[3] //= 2
    moved = tpu.traffic(
        length, slots=slots, kv_heads=kv_heads, dim=dim, size=size, tile=tile
    )
    blocks = -(-length // tile.slots)
    # With nothing cached one block is fetched: a pipeline cannot start without.
    rows = max(int(blocks.sum()), 1) * tile.slots
    assert moved == 2 * rows * kv_heads * dim * size


def test_a_window_bounds_the_traffic():
    tile = tiles.Tile(512, 8)
    sizes = dict(slots=8192, kv_heads=8, dim=128, size=2, tile=tile)
    length = np.array([8192, 5000], np.int32)
    moved = tpu.traffic(length, window=1024, **sizes)
    assert moved <= 2 * 2 * (1024 + 512) * 8 * 128 * 2
    assert moved < tpu.traffic(length, **sizes) / 3
