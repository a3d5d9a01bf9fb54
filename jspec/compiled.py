"""What the phases of a round cost by XLA's count, compiled for a chip that is not there."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec import decode, phases, topology
from jspec.closed_form import SLACK, Cost
from jspec.models import megatron
from jspec.models.config import Config
from jspec.phases import Drafting, Phase, Setting


def compiled(
    config: Config,
    drafter: str,
    setting: Setting | None,
    mesh: Mesh,
    batch: int,
    length: int,
) -> dict[str, Cost]:
    """The compiled costs of every phase on one device of ``mesh``."""
    slots = length + SLACK
    nodes = 1 if setting is None else setting.nodes
    kinds: dict[Any, list[int]] = {}
    for i in range(config.layers):
        kind = config.windows[i], config.ropes[i], config.has_experts(i)
        kinds.setdefault(kind, []).append(i)
    firsts = tuple(ids[0] for ids in kinds.values())
    taps = 0 if setting is None else phases.TAPS.get(drafter, 0)

    @functools.cache
    def of_layers(ids: tuple[int, ...]) -> dict[str, Cost]:
        found = phases.of_target(phases.select(config, ids), batch, nodes, slots, taps)
        return {name: cost_of(phase, mesh) for name, phase in found.items()}

    costs = {}
    base = of_layers(firsts)
    for name, one in base.items():
        total = one
        for ids in kinds.values():
            more = of_layers((*firsts, ids[0]))[name] + one * -1.0
            total += more * (len(ids) - 1)
        if total.seconds is not None and total.seconds <= 0:
            total = dataclasses.replace(total, seconds=None)
        costs[name] = total
    small = phases.select(config, firsts)
    if setting is None:
        drafted = Drafting(decode.no_drafts(), None)
    else:
        drafted = phases.drafting(drafter, small, setting)
    state = phases.state_of(small, drafted, batch, slots)
    for name, phase in phases.of_drafter(small, drafted, state).items():
        idle = setting is None and name != "accept"
        costs[name] = Cost() if idle else cost_of(phase, mesh)
    return costs


def cost_of(phase: Phase, mesh: Mesh) -> Cost:
    """Compiles a phase for ``mesh``, its arguments split over the devices."""

    def placed(path, x):
        spec = _split(path, x.shape, mesh.size)
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    arguments = jax.tree.map_with_path(placed, phase.arguments)
    with topology.compiling_for(mesh):
        jitted = jax.jit(phase.call, donate_argnums=phase.donated)
        program = jitted.lower(*arguments).compile()
    found: Any = program.cost_analysis()
    memory: Any = program.memory_analysis()
    seconds = found.get("optimal_seconds", 0.0)
    if seconds < 0:  # every operation without an estimate counts -1 s
        seconds -= math.floor(seconds)
    sound = mesh.size == 1 and seconds > 0  # collectives have no estimate either
    return Cost(
        found.get("flops", 0.0),
        found.get("bytes accessed", 0.0),
        seconds if sound else None,
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes,
    )


# Beside weights: latent attention by head, and caches by kv head.
_AXES = {name: axis for name, (_, axis) in megatron.SPLIT.items()}
_AXES |= {"q_b": 0, "kv_b": 0, "k": 1, "v": 1}


def _split(path, shape: tuple[int, ...], devices: int) -> PartitionSpec:
    names = [getattr(key, "name", None) for key in path]
    axis = next((_AXES[n] for n in reversed(names) if n in _AXES), None)
    if axis is None or axis >= len(shape) or shape[axis] % devices:
        return PartitionSpec()
    return PartitionSpec(*[None] * axis, topology.AXIS)
