"""The Hopper kernel against the reference, interpreted. Runs where JAX is new enough."""

import functools

import pytest
from attention_cases import BF16, TOLERANCE, Case, lengths, masks, worst

from jspec.pallas import IMPLEMENTATIONS

pytestmark = pytest.mark.skipif(
    "gpu" not in IMPLEMENTATIONS, reason="Mosaic GPU needs jax >= 0.11.2"
)

CASES = [
    # GQA ratios 1 to 16, N from 1 to 128, every D, capacities of whole blocks and not.
    Case(2, 1, 2, 2, 64, 192, BF16),
    Case(2, 5, 8, 2, 128, 128, BF16, softcap=5.0),
    Case(1, 40, 2, 1, 64, 256, BF16),
    Case(2, 4, 16, 1, 96, 192, BF16),
    Case(1, 3, 2, 1, 256, 128, BF16),
    Case(2, 7, 4, 2, 96, 32, BF16),  # a cache of less than a block
    Case(1, 128, 1, 1, 64, 128, BF16),
    Case(1, 16, 8, 2, 128, 192, BF16, softcap=3.0),
    Case(2, 2, 8, 1, 256, 96, BF16),
    Case(3, 6, 3, 1, 96, 160, BF16, softcap=5.0),
    Case(1, 33, 4, 1, 128, 64, BF16),
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


def test_the_generated_set_is_large():
    total = sum(len(lengths(c, 0)) * len(masks(c, 0)) for c in CASES)
    assert total >= 200
