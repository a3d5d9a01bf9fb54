"""The options of experiments with block-diffusion drafters, and the methods they name."""

from pathlib import Path

import pytest

import jspec
from jspec import bench
from jspec.block_options import add_block_arguments, block_methods
from jspec.tree_options import HEADS

DATA = Path(__file__).parent / "data" / "parity"


@pytest.fixture(scope="module")
def target():
    return jspec.load(DATA / "dflash_target", dtype="float32")


def methods(target, *words, head="dflash_v1"):
    parser = bench.argument_parser(None, {"drafter": str(DATA / head)})
    add_block_arguments(parser)
    return block_methods(target, parser.parse_args(words))


def test_a_method_for_every_gamma(target):
    found = methods(target, "--gamma", "2", "5", "--point")
    assert [m.name for m in found] == ["dflash_v1 2", "dflash_v1 5"]
    shapes = [m.draft.drafter.shape for m in found]
    assert [(s.nodes, s.depth, s.dense) for s in shapes] == [
        (3, 2, False),
        (6, 5, False),
    ]
    (whole,) = methods(target)
    assert whole.draft.drafter.shape.depth == 5 and whole.draft.drafter.shape.dense


def test_a_method_for_every_threshold(target):
    found = methods(target, "--least", "0", "0.5", "--gamma", "3")
    assert [m.name for m in found] == ["dflash_v1 3", "dflash_v1 3 above 0.5"]
    assert found[1].draft.drafter.shape.widths == (1, 2)


def test_what_cannot_be_drafted_is_said(target):
    with pytest.raises(ValueError, match="gamma is 9; blocks of 6 rows"):
        methods(target, "--gamma", "9")
    with pytest.raises(FileNotFoundError, match="train one with jspec train"):
        methods(target, "--drafter", str(HEADS / "nothing"))
