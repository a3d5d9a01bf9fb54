"""Predictions from compiled programs. Runs where libtpu is installed."""

import pytest

from jspec import phases, topology
from jspec.closed_form import SLACK, arithmetic
from jspec.compiled import compiled, cost_of
from jspec.models.presets import preset
from jspec.phases import Setting

pytestmark = pytest.mark.skipif(not topology.installed(), reason="needs libtpu")
LLAMA = preset("llama-3.1-8b")


def test_layers_extrapolate():
    """Four layers compiled at once cost what one and two predict."""
    mesh = topology.tpu_mesh("v5e")
    four = phases.select(LLAMA, (0, 1, 2, 3))
    found = compiled(four, "ngram", None, mesh, 1, 1024)["score"]
    whole = cost_of(phases.of_target(four, 1, 1, 1024 + SLACK)["score"], mesh)
    assert found.flops == pytest.approx(whole.flops, rel=0.02)
    assert found.moved == pytest.approx(whole.moved, rel=0.02)
    assert found.memory == pytest.approx(whole.memory, rel=0.02)
    assert found.seconds == pytest.approx(whole.seconds, rel=0.1)


def test_compiled_costs_agree_with_arithmetic():
    """But for what ``jspec.predict`` says: one row's FLOPs, and copies among the bytes."""
    mesh = topology.tpu_mesh("v5e")
    for setting in (None, Setting(5, 4)):
        ours = arithmetic(LLAMA, "eagle3", setting, 1, 2048, 1)["score"]
        found = compiled(LLAMA, "eagle3", setting, mesh, 1, 2048)["score"]
        assert found.memory == pytest.approx(ours.memory, rel=0.1)
        assert found.moved > ours.moved
        if setting is not None:
            assert found.flops == pytest.approx(ours.flops, rel=0.1)


def test_a_mesh_shares_the_weights():
    alone, shared = (
        compiled(LLAMA, "ngram", None, topology.tpu_mesh("v5e", n), 1, 1024)
        for n in (1, 8)
    )
    assert shared["score"].memory < alone["score"].memory / 6
    assert shared["score"].seconds is None
