"""The Hopper kernel against the reference, interpreted. Runs where JAX is new enough."""

import functools

import pytest
from attention_cases import BF16, TOLERANCE, Case, worst

from jspec.pallas import IMPLEMENTATIONS

pytestmark = pytest.mark.skipif(
    "gpu" not in IMPLEMENTATIONS, reason="Mosaic GPU needs jax >= 0.11.2"
)

CASES = [
    Case(2, 1, 4, 4, 64, 200, BF16),
    Case(2, 5, 8, 2, 128, 136, BF16, softcap=5.0),
    Case(1, 40, 2, 1, 64, 256, BF16),
    Case(2, 4, 16, 1, 96, 192, BF16),
    Case(1, 3, 2, 1, 256, 128, BF16),
    Case(2, 7, 4, 2, 64, 40, BF16),  # a cache of less than a block
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_reference(case):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from jspec.pallas import gpu

    kernel = functools.partial(
        gpu.block_attention, interpret=plgpu.InterpretGPUParams(), **case.options
    )
    error, _ = worst(case, kernel, CASES.index(case))
    assert error <= TOLERANCE[case.dtype]
