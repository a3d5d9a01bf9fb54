"""The TPU kernel compiled for chips that are not there. Runs where libtpu is installed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jspec import topology
from jspec.pallas import block_attention, tiles, tpu

CHIPS = sorted(topology.TPUS)
needs_libtpu = pytest.mark.skipif(not topology.installed(), reason="needs libtpu")
BF16, F32 = jnp.bfloat16, jnp.float32

# batch, nodes, heads, kv heads, head size, slots, dtype, window, soft-cap
TABLE = [
    (8, 32, 32, 8, 128, 8192, BF16, None, None),  # Llama 3.1 8B
    (8, 32, 32, 8, 128, 8192, F32, None, None),
    (1, 1, 32, 8, 128, 131072, BF16, None, None),
    (1, 8, 64, 8, 128, 1000, BF16, 512, None),  # Llama 3.1 70B
    (2, 5, 9, 3, 64, 329, BF16, None, None),  # SmolLM2
    (1, 128, 16, 1, 128, 2048, BF16, None, None),
    (2, 7, 12, 12, 96, 300, F32, None, None),
    (1, 33, 4, 1, 256, 1024, F32, 512, 50.0),  # Gemma
]


def compiled(chip, batch, nodes, heads, kv_heads, dim, slots, dtype, window, softcap):
    mesh = topology.tpu_mesh(chip)
    here = NamedSharding(mesh, PartitionSpec())

    def array(*shape, of=dtype):
        return jax.ShapeDtypeStruct(shape, of, sharding=here)

    own = array(batch, nodes, kv_heads, dim)
    call = functools.partial(
        block_attention, scale=0.1, window=window, softcap=softcap, impl="tpu"
    )
    with topology.compiling_for(mesh):
        lowered = jax.jit(call).lower(
            array(batch, nodes, heads, dim),
            array(batch, kv_heads, dim, slots),
            array(batch, kv_heads, slots, dim),
            array(batch, of=jnp.int32),
            own,
            own,
            array(batch, nodes, nodes, of=jnp.bool_),
        )
    return lowered.compile()


@needs_libtpu
@pytest.mark.parametrize("chip", CHIPS)
def test_all_supported_shapes_compile(chip):
    for row in TABLE:
        assert "tpu_custom_call" in compiled(chip, *row).as_text()


@needs_libtpu
@pytest.mark.parametrize("chip", CHIPS)
def test_a_full_cache_is_read_once(chip):
    program = compiled(chip, *TABLE[0])
    batch, _, _, kv_heads, dim, slots, dtype, *_ = TABLE[0]
    live = 2 * batch * kv_heads * dim * slots * jnp.dtype(dtype).itemsize
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
