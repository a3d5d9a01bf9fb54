"""Data parallelism: batches split over devices, everything else on all of them.

``jit`` does the rest: a loss that is a mean over the batch is the same mean, and its
gradient is reduced over the devices.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def data_mesh(devices: int | None = None) -> Mesh:
    """A mesh of one axis, ``data``, over the first ``devices`` devices (None: all).

    Raises:
      ValueError: there are not so many.
    """
    there = jax.devices()
    count = len(there) if devices is None else devices
    if not 1 <= count <= len(there):
        raise ValueError(f"a mesh of {count} devices; this machine has {len(there)}")
    return jax.make_mesh(
        (count,), ("data",), devices=there[:count], axis_types=(AxisType.Auto,)
    )


def replicate(tree: Any, mesh: Mesh) -> Any:
    """The arrays of a pytree, whole on every device."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def shard(batch: Any, mesh: Mesh) -> Any:
    """The arrays of a batch with their first axis split over ``data``.

    Raises:
      ValueError: it cannot be split evenly.
    """
    for leaf in jax.tree.leaves(batch):
        if leaf.shape[0] % mesh.size:
            raise ValueError(
                f"a batch of {leaf.shape[0]} rows cannot be split evenly over "
                f"{mesh.size} devices; use a multiple of {mesh.size}"
            )
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
