"""Tiles of the attention kernels: how much of the cache one step takes. Data only.

``benchmarks/search_tiles.py`` finds them over compiled cost; ``docs/kernels.md`` says how
and shows the figures.
"""

from __future__ import annotations

import math
from typing import NamedTuple

VMEM_LIMIT = 64 * 2**20  # bytes a kernel may ask for; half of a v5e core's memory
_BUDGET = 40 * 2**20  # bytes of it that tiles are chosen for: the rest is XLA's


class Tile(NamedTuple):
    """``slots`` cache slots and ``heads`` kv heads in one step of the kernel."""

    slots: int
    heads: int


# The best slots of a step by bytes of a head's slot (D times the bytes of a number);
# heads are as many as fit. The same on every chip: see the search.
SLOTS = {128: 1024, 192: 1024, 256: 1024, 384: 512, 512: 512, 1024: 512}


def tpu(slots: int, kv_heads: int, rows: int, keys: int, dim: int, size: int) -> Tile:
    """The tile for a cache of ``slots`` slots and queries of ``rows`` rows a kv head.

    Args:
      slots: capacity of the cache.  kv_heads: K.
      rows: padded rows of a kv head.  keys: padded block keys.
      dim: D.  size: bytes of a cached number.
    """
    width = SLOTS[dim * size]
    while width > 128 and footprint(Tile(width, 1), rows, keys, dim, size) > _BUDGET:
        width //= 2
    width = min(slots, width)
    fitting = [
        heads
        for heads in range(1, kv_heads + 1)
        if kv_heads % heads == 0
        and footprint(Tile(width, heads), rows, keys, dim, size) <= _BUDGET
    ]
    return Tile(width, max(fitting, default=1))


def footprint(tile: Tile, rows: int, keys: int, dim: int, size: int) -> int:
    """Bytes of VMEM that the TPU kernel needs: what is piped twice, and what is computed."""
    lanes = -(-dim // 128) * 128
    cache = tile.slots * (dim + lanes) * size
    own = 2 * keys * lanes * size + 2 * rows * lanes * size
    piped = 2 * tile.heads * (cache + own) + 2 * rows * max(keys, 128) * 4
    scratch = tile.heads * rows * (lanes + 2 * 128) * 4
    scores = tile.heads * rows * tile.slots * (4 + 4 + size)
    return piped + scratch + scores


# The Hopper kernel: copies in flight, cells that fill the chip.
GPU_STAGES = 2
_CELLS = 2 * 132  # two on each of 132 multiprocessors


def gpu_shares(cells: int, blocks: int) -> int:
    """Shares the cache of ``blocks`` blocks is split into, given ``cells`` without it."""
    return max(1, min(-(-_CELLS // cells), blocks))


def gpu_slots(dim: int) -> int:
    """Cache slots of a copy: with D = 256 more would not fit in shared memory."""
    return 64 if dim <= 128 else 32


def gpu_multiple(dim: int) -> int:
    """What a cache's slots must be a multiple of: the columns of a swizzled tile."""
    return math.gcd(dim, gpu_slots(dim))
