"""The TPU kernel against the reference, interpreted, with garbage in every dead slot."""

import functools

import pytest
from attention_cases import BF16, TOLERANCE, Case, lengths, masks, worst

from jspec.pallas import tpu
from jspec.pallas.tiles import Tile

CASES = [
    # GQA ratios 1 to 16, N from 1 to 128, D 64, 96, 128 and 256, odd capacities.
    Case(3, 1, 4, 4, 64, 300, tile=Tile(128, 2)),
    Case(3, 5, 6, 2, 64, 384, tile=Tile(128, 1), softcap=5.0),
    Case(2, 8, 16, 1, 128, 256, tile=Tile(128, 1)),
    Case(3, 7, 8, 2, 96, 200),
    Case(2, 4, 2, 1, 256, 320, tile=Tile(128, 1)),
    Case(1, 128, 2, 1, 64, 256, tile=Tile(128, 1)),
    Case(3, 6, 4, 2, 64, 500, tile=Tile(128, 2), window=100),
    Case(3, 9, 4, 2, 64, 512, tile=Tile(128, 1), window=300, softcap=3.0),
    Case(3, 3, 8, 4, 128, 256, BF16, Tile(128, 4)),
    Case(3, 16, 8, 2, 64, 330, BF16, Tile(128, 1)),
    Case(2, 33, 4, 2, 96, 256, BF16, Tile(128, 2), softcap=5.0),
    Case(3, 8, 4, 2, 256, 384, BF16, Tile(128, 1), window=150),
    Case(2, 2, 5, 5, 64, 129, BF16),
    Case(8, 4, 4, 2, 64, 384, BF16, Tile(128, 2)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_reference(case):
    kernel = functools.partial(
        tpu.block_attention, tile=case.tile, interpret=True, **case.options
    )
    error, _ = worst(case, kernel, CASES.index(case))
    assert error <= TOLERANCE[case.dtype]


def test_the_generated_set_is_large():
    total = sum(len(lengths(c, 0)) * len(masks(c, 0)) for c in CASES)
    assert total >= 200
