"""Several devices and several processes give the tokens of one."""

import functools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jspec.serve import mesh
from jspec.serve.engine import Engine
from jspec.testing import tiny

SCRIPT = Path(__file__).parent / "mesh_run.py"


def start(devices, *arguments):
    flags = (
        f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    )
    root = str(Path(__file__).parents[2])
    environment = {
        **os.environ,
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": root,
    }
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answer(process):
    out, error = process.communicate(timeout=400)
    assert process.returncode == 0, error[-3000:]
    return json.loads(out.splitlines()[-1])


@functools.cache
def on_one_host():
    return answer(start(8))


@pytest.mark.slow
def test_tokens_are_the_same_on_1_2_4_and_8_devices():
    found = on_one_host()
    assert list(found) == ["1 x 1", "1 x 2", "2 x 2", "2 x 4"]
    for name, tokens in found.items():
        assert tokens == found["1 x 1"], name
    assert all(len(t) == 16 for t in found["1 x 1"])


@pytest.mark.slow
def test_two_processes_give_the_tokens_of_one():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    both = [start(1, port, rank) for rank in range(2)]
    for rank, process in enumerate(both):
        assert answer(process)[f"process {rank}"] == on_one_host()["1 x 1"]


def test_meshes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="needs 64 devices"):
        mesh.make(8, 8)
    small = tiny.model(seed=3, layers=1)
    one = mesh.make()
    assert Engine(small, sizes=3, context=64, mesh=one).load == (0, 0)

    class Split:
        def __init__(self):
            self.shape = {"data": 2, "model": 1}

    with pytest.raises(ValueError, match="batch of 3 does not split over 2"):
        mesh.check(Split(), (2, 3))
