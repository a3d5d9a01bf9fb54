"""The Hopper kernel compiled for GPUs that are not there. Runs where the CUDA packages are."""

import pytest
from attention_programs import compiled, gpu_programs

from jspec import topology

pytestmark = pytest.mark.skipif(
    not topology.cuda_installed(), reason="needs the CUDA plug-in and jax >= 0.11.2"
)


@pytest.mark.parametrize("program", gpu_programs())
def test_the_supported_table_compiles(program):
    shapes = gpu_programs()[program]
    text = compiled(topology.gpu_mesh("h100"), shapes, "gpu").as_text()
    assert text.count('custom_call_target="mosaic_gpu_v2"') == len(shapes)


def test_an_h200_compiles_too():
    shapes = gpu_programs()["models"][:1]
    text = compiled(topology.gpu_mesh("h200"), shapes, "gpu").as_text()
    assert "mosaic_gpu" in text
