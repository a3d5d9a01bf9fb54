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

# What XLA's compiler asks of a GPU; both have the same multiprocessors.
_HOPPER = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: {memory}
  shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "NVIDIA {name}"
"""
GPUS = {
    "h100": dict(name="H100 80GB HBM3", bandwidth=3352320000000, memory=84978434048),
    "h200": dict(name="H200", bandwidth=4800000000000, memory=150754820096),
}

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


def cuda_installed() -> bool:
    """Whether the CUDA plug-in is here, with a compiler and a JAX that knows Hopper."""
    packages = ("jax_plugins.xla_cuda13", "nvidia.cu13")
    return jax.__version_info__ >= (0, 11, 2) and all(map(_found, packages))


def _found(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False


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


def gpu_mesh(chip: str) -> Mesh:
    """A mesh of one GPU that need not be there.

    Args:
      chip: a name of ``GPUS``.

    Raises:
      ValueError: an unknown chip.
      RuntimeError: the CUDA plug-in or its compiler is not installed, or was given up
        by a JAX that did not find a GPU.
    """
    if chip not in GPUS:
        raise ValueError(f"chip {chip!r} is not one of {sorted(GPUS)}")
    if not cuda_installed():
        raise RuntimeError(
            f"compiling for {chip} needs jax >= 0.11.2 and the packages "
            "jax-cuda13-pjrt, jax-cuda13-plugin and nvidia-cuda-nvcc"
        )
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # of the driver
    try:
        found = topologies.get_topology_desc(
            platform="cuda",
            topology_name="1x1x1",
            topology="1x1x1",
            target_config=_HOPPER.format(**GPUS[chip]),
        ).devices
    except NotImplementedError as error:
        # JAX looked for a GPU, and gave the plug-in up.
        raise RuntimeError(
            f"compiling for {chip} needs JAX_PLATFORMS=cpu before JAX starts"
        ) from error
    return Mesh(np.asarray(found[:1]), (AXIS,), axis_types=(AxisType.Auto,))


@contextlib.contextmanager
def compiling_for(mesh: Mesh) -> Iterator[None]:
    """Inside, kernels are chosen for the chips of ``mesh``."""
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield
