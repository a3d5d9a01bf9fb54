"""Settings common to all tests."""

import gc
import os
from importlib.metadata import version
from pathlib import Path

# Most of the time goes into compiling tiny programs: into LLVM's optimizer, into dividing
# them among threads, and before jaxlib 0.12 into emitters of fusions that can be left out.
FLAGS = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
]
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 12):
    FLAGS += ["--xla_cpu_use_fusion_emitters=false"]
os.environ["XLA_FLAGS"] = " ".join([*FLAGS, os.environ.get("XLA_FLAGS", "")])

import jax
import pytest
from hypothesis import settings

# The first example compiles; a deadline would measure XLA.
settings.register_profile("jspec", deadline=None)
settings.load_profile("jspec")

MAPS = Path("/proc/self/maps")
MANY, MOST = 20_000, 45_000  # memory mappings


def forget_programs(limit):
    """Drops compiled programs before they exhaust the process's memory mappings.

    Every program of XLA:CPU holds some, Linux allows a process 65,530 of them, and the
    whole suite in one process would crash in the compiler.
    """
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > limit:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True, scope="module")
def start_afresh():
    """Between modules, so that within one what was compiled stays compiled."""
    yield
    forget_programs(MANY)


@pytest.fixture(autouse=True)
def survive():
    """Within a module only at the last moment."""
    yield
    forget_programs(MOST)
