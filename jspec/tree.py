"""Topologies: what the ``parent`` array of a block implies."""

from __future__ import annotations

import jax.numpy as jnp

from jspec.types import Array


def ancestors(parent: Array) -> Array:
    """Ancestor-or-self mask ``[..., N, N]`` of ``parent [..., N]`` (-1 at the root).

    ``mask[i, j]`` is true iff node ``j`` is node ``i`` or one of its ancestors, which is
    exactly what node ``i`` may attend to inside its block. Path doubling: log2(N)
    boolean products instead of N dependent steps.
    """
    n = parent.shape[-1]
    node = jnp.arange(n)
    reach = (node == node[:, None]) | (node == parent[..., None])
    span = 1
    while span < n - 1:
        step = reach.astype(jnp.float32)
        reach = jnp.einsum("...ij,...jk->...ik", step, step) > 0
        span *= 2
    return reach


def depth(mask: Array) -> Array:
    """Depth ``[..., N]`` of every node (root 0) from its ancestor mask."""
    return jnp.sum(mask, -1, dtype=jnp.int32) - 1


def path_to(mask: Array, leaf: Array) -> Array:
    """Nodes ``[N]`` from the root to ``leaf`` (scalar), -1 after the end.

    Ancestors have smaller ids than descendants, so sorting the ids orders the path.
    """
    n = mask.shape[-1]
    nodes = jnp.sort(jnp.where(mask[leaf], jnp.arange(n), n))
    return jnp.where(nodes < n, nodes, -1).astype(jnp.int32)
