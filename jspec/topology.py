"""Chips that are not there: descriptions that programs can be compiled for.

XLA compiles for a TPU with ``libtpu`` and for an NVIDIA GPU with the CUDA PJRT plug-in;
neither needs the chip or its driver. A compiled program knows its FLOPs, its bytes and its
memory; nothing can be run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

# The smallest topology of each TPU, and one with eight devices.
TPUS = {
    "v5e": ("v5e:2x2", "v5e:2x4"),
    "v5p": ("v5p:2x2x1", "v5p:2x2x2"),
    "v6e": ("v6e:2x2", "v6e:2x4"),
    "tpu7x": ("tpu7x:2x2x1", "tpu7x:2x2x2"),
}
AXIS = "model"  # the mesh axis of tensor parallelism


def slice_of(name: str) -> tuple[str, int]:
    """The chip and the number of JAX devices of a cloud slice such as ``v5e-8``.

    The number in the name of a v5p slice counts TensorCores, of which JAX shows two as one
    device; those of v5e and v6e slices count chips.

    Raises:
      ValueError: another name.
    """
    chip, _, count = name.partition("-")
    cores = 2 if chip == "v5p" else 1
    if chip not in ("v5e", "v5p", "v6e") or not count.isdecimal() or int(count) % cores:
        raise ValueError(
            f"mesh {name!r} is not a slice such as v5e-8, v6e-8 or v5p-16 (16 "
            "TensorCores, 8 chips); for others give a chip and a number of devices"
        )
    return chip, int(count) // cores


def installed() -> bool:
    """Whether ``libtpu`` is here, so that programs for TPUs can be compiled."""
    return importlib.util.find_spec("libtpu") is not None


def tpu_mesh(chip: str, devices: int = 1) -> Mesh:
    """A mesh of ``devices`` devices of a TPU that need not be there.

    Args:
      chip: a name of ``TPUS``.  devices: 1 to 8, on the axis ``AXIS``. A device is what
        JAX shows as one: half of a TPU7x chip.

    Raises:
      ValueError: an unknown chip, or more devices than a topology has.
      RuntimeError: ``libtpu`` is not installed.
    """
    if chip not in TPUS:
        raise ValueError(f"chip {chip!r} is not one of {sorted(TPUS)}")
    if not installed():
        raise RuntimeError(
            f"compiling for {chip} needs libtpu: pip install 'jspec[aot]'"
        )
    # libtpu would ask a cloud machine's metadata server who it is.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # Without a chip nothing is locked: several processes may compile at once.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-1")
    name = TPUS[chip][0 if devices <= 4 else 1]
    found = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    if not 1 <= devices <= len(found):
        raise ValueError(f"devices is {devices}; {name} has {len(found)}")
    chosen = np.asarray(found[:devices])
    return Mesh(chosen, (AXIS,), axis_types=(AxisType.Auto,))


@contextlib.contextmanager
def compiling_for(mesh: Mesh) -> Iterator[None]:
    """Inside, kernels are chosen for the chips of ``mesh``."""
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield
