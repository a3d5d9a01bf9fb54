"""The live nodes of a batch of blocks, side by side in fewer rows.

All of a forward but attention works on rows that know nothing of one another. When few
nodes of a batch are live these rows can be the live nodes alone, whichever sequences they
are of; attention spreads them over their blocks again, where a sequence has its own cache.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct

from jspec.types import Array


@struct.dataclass
class Packed:
    """Which R of ``B N`` nodes have a row.

    Attributes:
      node: ``[R]`` numbers of nodes, counted block after block; the live ones come first.
      row: ``[B, N]`` the row of every node; 0 for those without.
    """

    node: Array
    row: Array


def pack(live: Array, count: int | None) -> Packed | None:
    """Rows for the live nodes of ``live [B, N]``, of which there are at most ``count``.

    None, a row for every node, if ``count`` is.
    """
    if count is None:
        return None
    node = jnp.argsort(~live.ravel(), stable=True)[:count]
    row = jnp.zeros(live.size, jnp.int32).at[node].set(jnp.arange(count))
    return Packed(node, row.reshape(live.shape))


def rows(packed: Packed | None, x: Array) -> Array:
    """``x [B, N, ...]`` as it is, or its packed rows ``[1, R, ...]``."""
    if packed is None:
        return x
    return x.reshape(-1, *x.shape[2:])[packed.node][None]


def blocks(packed: Packed | None, x: Array) -> Array:
    """The inverse; nodes without a row get what another node has."""
    return x if packed is None else x[0][packed.row]
