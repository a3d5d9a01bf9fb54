"""The heads in ``checkpoints/``: they load, they guess, they keep the target's text."""

import functools
import json
from pathlib import Path

import pytest

import jspec
from jspec.models import load

HEADS = sorted((Path(__file__).parents[1] / "checkpoints").glob("*/config.json"))
# What the target itself continues, so that good heads are often right.
PROMPT = "Write a short story about a lighthouse keeper who finds a letter."
pytestmark = pytest.mark.slow


@functools.cache
def target():
    return load("smollm2-135m")


@functools.cache
def plain():
    return jspec.generate(target(), None, PROMPT, max_new_tokens=48).tokens


def test_there_are_heads():
    assert HEADS


def test_a_head_has_a_short_name():
    assert jspec.load_drafter("eagle3", target()).name == "eagle3-smollm2-135m"


@pytest.mark.parametrize("config", HEADS, ids=lambda file: file.parent.name)
def test_a_shipped_head_drafts(config):
    folder = config.parent
    assert json.loads(config.read_text())
    assert (folder / "README.md").read_text().startswith(f"# {folder.name}")
    files = [f for f in folder.iterdir() if f.suffix == ".safetensors"]
    assert sum(f.stat().st_size for f in files) <= 25e6
    draft = jspec.load_drafter(folder, target())
    out = jspec.generate(target(), draft, PROMPT, max_new_tokens=48)
    assert out.tokens == plain()
    # Weights in the wrong place guess next to nothing; the weakest of these heads, 0.14.
    assert out.stats.acceptance_by_depth[0] > 0.1
