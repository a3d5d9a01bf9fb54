"""Predictions from compiled programs. Runs where libtpu, or JAX's CUDA plug-in, is installed."""

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jspec import phases, topology
from jspec.closed_form import SLACK, arithmetic
from jspec.compiled import compiled, cost_of
from jspec.models.presets import preset
from jspec.phases import Setting

needs_libtpu = pytest.mark.skipif(not topology.installed(), reason="needs libtpu")
LLAMA = preset("llama-3.1-8b")


@needs_libtpu
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


@needs_libtpu
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


@needs_libtpu
def test_a_mesh_shares_the_weights():
    alone, shared = (
        compiled(LLAMA, "ngram", None, topology.tpu_mesh("v5e", n), 1, 1024)
        for n in (1, 8)
    )
    assert shared["score"].memory < alone["score"].memory / 6
    assert shared["score"].seconds is None


@needs_libtpu
def test_what_nobody_asked_for_is_not_counted():
    """With either side of every condition, 50 reads of the logits would be counted."""
    mesh = topology.tpu_mesh("v5e")
    setting = Setting(5, 4)
    drafted = phases.drafting("ngram", LLAMA, setting)
    small = phases.select(LLAMA, (0,))
    state = phases.state_of(small, drafted, 8, 256)
    phase = phases.of_drafter(small, drafted, state)["accept"]
    logits = 4 * 8 * setting.nodes * LLAMA.vocab_size
    assert logits < cost_of(phase, mesh).moved < 15 * logits


@pytest.mark.skipif(not topology.cuda_installed(), reason="needs the CUDA plug-in")
def test_a_round_compiles_for_a_gpu():
    """Every phase, without a second copy of what it is given."""
    here = NamedSharding(topology.gpu_mesh("h100"), PartitionSpec())
    config, setting = phases.select(LLAMA, (0,)), Setting(5, 4)
    drafted = phases.drafting("eagle3", config, setting)
    state = phases.state_of(config, drafted, 1, 1024)
    target = phases.of_target(config, 1, setting.nodes, 1024, 3)
    for name, phase in (target | phases.of_drafter(config, drafted, state)).items():
        given = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here),
            phase.arguments,
        )
        with topology.compiling_for(here.mesh):
            jitted = jax.jit(phase.call, donate_argnums=phase.donated)
            memory = jitted.lower(*given).compile().memory_analysis()
        if name != "accept":  # which has nothing but activations
            assert memory.temp_size_in_bytes < 0.02 * memory.argument_size_in_bytes
