"""Model and slots over several devices: tensor-parallel weights, data-parallel slots.

Weights lie in the Megatron layout (``jspec.models.megatron``), those of experts are copied.
XLA inserts the reductions. An axis that the mesh does not divide stays whole, so any model
runs on any mesh.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec.cache import KVCache
from jspec.drafters.draft import Draft
from jspec.models import Model, megatron
from jspec.serve.slots import Axes, Shardings
from jspec.state import State

_WHOLE = -1


def make(data: int = 1, model: int = 1, devices: Any = None) -> Mesh:
    """A mesh of ``data * model`` devices, by default the first ones.

    Raises:
      ValueError: there are not so many.
    """
    devices = jax.devices() if devices is None else devices
    if data < 1 or model < 1 or data * model > len(devices):
        raise ValueError(
            f"a mesh of {data} x {model} needs {data * model} devices, and there are "
            f"{len(devices)}"
        )
    return jax.make_mesh(
        (data, model),
        ("data", "model"),
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
        devices=devices[: data * model],
    )


def check(mesh: Mesh, sizes: tuple[int, ...]) -> None:
    """Refuses batch sizes that do not split over ``data``.

    Raises:
      ValueError: naming the size.
    """
    data = mesh.shape["data"]
    for size in sizes:
        if size % data:
            raise ValueError(
                f"a batch of {size} does not split over {data} data-parallel devices; "
                f"use sizes that are multiples of {data}"
            )


def shard(mesh: Mesh, model: Model) -> Model:
    """The model with its weights split over ``model`` and copied over ``data``."""

    def put(path, x):
        names = [k.name for k in path if isinstance(k, jax.tree_util.GetAttrKey)]
        ndim, axis = megatron.SPLIT.get(names[-1] if names else "", (0, _WHOLE))
        return _put(mesh, np.asarray(x), axis if x.ndim == ndim else _WHOLE)

    sharded = jax.tree_util.tree_map_with_path(put, model.params)
    return dataclasses.replace(model, params=sharded)


def replicate(mesh: Mesh, draft: Draft) -> Draft:
    """The drafter with its weights copied to every device."""
    return draft._replace(params=copied(mesh, draft.params))


def copied(mesh: Mesh, tree: Any) -> Any:
    """Arrays copied to every device, those of other processes included."""

    def copy(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(copy(jax.random.key_data(x)))
        return _put(mesh, np.asarray(x), _WHOLE)

    return jax.tree.map(copy, tree)


def _put(mesh: Mesh, x: Any, axis: int):
    return jax.device_put(x, _sharding(mesh, x, {axis: "model"}))


def _sharding(mesh: Mesh, x: Any, split: dict[int, str]) -> NamedSharding:
    """``x`` split along the given axes, as far as the mesh divides them."""
    spec: list[str | None] = [None] * x.ndim
    for axis, name in split.items():
        if axis != _WHOLE and not x.shape[axis] % mesh.shape[name]:
            spec[axis] = name
    return NamedSharding(mesh, PartitionSpec(*spec))


def layout(mesh: Mesh, like: State, axes: Axes, size: int) -> Shardings:
    """Shardings of every leaf of a state of ``size`` slots.

    Slots are split over ``data``; the target's cache by kv head over ``model``.

    Args:
      mesh: the devices.  like: a state of any size.
      axes: as from ``slots.row_axes``.
    """
    heads = jax.tree.map(lambda x: _WHOLE, like)
    if isinstance(like.cache, KVCache):
        by_head = jax.tree.map(lambda x: 1 if x.ndim > 1 else _WHOLE, like.cache)
        heads = heads.replace(cache=by_head)
    found = []
    for leaf, rows, head in zip(
        jax.tree.leaves(like), axes, jax.tree.leaves(heads), strict=True
    ):
        shape = [size if i == rows else n for i, n in enumerate(leaf.shape)]
        sized = jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)
        found.append(_sharding(mesh, sized, {rows: "data", head: "model"}))
    return tuple(found)
