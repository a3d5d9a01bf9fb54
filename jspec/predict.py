"""What a round costs on a chip that is not there, and the speed-up that follows.

Every figure is one of two kinds, and says which. *XLA's*: the phases of the real round are
compiled for the chip (TPUs, where ``libtpu`` is installed), with abstract weights; FLOPs,
bytes, memory and the estimated time are those of the compiled programs. Of every kind of
layer a model of one and one with a second are compiled, and the rest follows, for equal
layers cost the same. *Arithmetic*: closed forms over the sizes, for any chip: what must be
computed and what must cross the memory bus once.

The terms of a speed-up are the bounds of the roofline (``jspec.roofline``) over the latter.
XLA's bytes, and its time with them, count a weight that is fetched to the chip ahead of its
product up to five times (the copy's two sides, its end, the product); a product with one
row fetches nothing, so that ratios of XLA's times would favour short blocks. Its FLOPs of one
row are 2.5 times the usual count, for such a product is written with vector operations.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec import checks, decode, phases, roofline, theory, topology, tree
from jspec.models.config import Config
from jspec.phases import Drafting, Phase, Setting

SLACK = 128  # slots beyond the cached tokens: room for a block
_GUESSES = 10  # children of a node that a predicted tree may have


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a program costs one device.

    Attributes:
      flops: floating-point operations.  moved: bytes read and written.
      seconds: XLA's estimate, None where there is none.
      memory: bytes of its arguments, results and temporaries.
    """

    flops: float = 0.0
    moved: float = 0.0
    seconds: float | None = 0.0
    memory: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        known = self.seconds is not None and other.seconds is not None
        return Cost(
            self.flops + other.flops,
            self.moved + other.moved,
            self.seconds + other.seconds if known else None,  # type: ignore[operator]
            self.memory + other.memory,
        )

    def __mul__(self, factor: float) -> Cost:
        seconds = None if self.seconds is None else self.seconds * factor
        return Cost(
            self.flops * factor, self.moved * factor, seconds, self.memory * factor
        )

    def bound(self, chip: roofline.Chip) -> float:
        """Seconds on the roofline."""
        return roofline.roofline_seconds(self.flops, self.moved, chip)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A round of one setting.

    Attributes:
      setting: how it drafts; None for a plain step.
      costs: of the phases ``propose``, ``update``, ``score``, ``accept``, ``append``;
        XLA's where ``Table.compiled``, arithmetic elsewhere.
      bounds: seconds of the phases on the roofline, always arithmetic.
      tau: tokens a round, bonus included, or None without an acceptance profile.
    """

    setting: Setting | None
    costs: dict[str, Cost]
    bounds: dict[str, float]
    tau: float | None = None

    @property
    def draft(self) -> float:
        return self.bounds["propose"] + self.bounds["update"]

    @property
    def verify(self) -> float:
        return self.bounds["score"] + self.bounds["accept"] + self.bounds["append"]

    @property
    def memory(self) -> float:
        """Bytes a device needs: the largest phase, for all share weights and caches."""
        return max(cost.memory for cost in self.costs.values())


@dataclasses.dataclass(frozen=True)
class Table:
    """Predictions for one target, drafter, chip and batch.

    Attributes:
      plain: a step of plain decoding.  rows: one a setting.
      compiled: were FLOPs and bytes taken from compiled programs?
      attention: which kernel the programs call.
    """

    plain: Prediction
    rows: tuple[Prediction, ...]
    compiled: bool
    attention: str

    def ratio(self, row: Prediction) -> float:
        """``T_verify(N) / T_decode``."""
        return row.verify / self.plain.verify

    def break_even(self, row: Prediction) -> float:
        """The tau above which the setting pays."""
        return (row.draft + row.verify) / self.plain.verify

    def speedup(self, row: Prediction) -> float | None:
        if row.tau is None:
            return None
        return theory.speedup(self.plain.verify, row.draft, row.verify, row.tau)

    @property
    def best(self) -> Prediction | None:
        """The setting with the largest speed-up, None if none is above 1."""
        pays = [r for r in self.rows if (self.speedup(r) or 0.0) > 1.0]
        return max(pays, key=lambda r: self.speedup(r) or 0.0, default=None)


def expected_tau(setting: Setting, acceptance: Sequence[float]) -> float:
    """Tokens a round for an acceptance profile, bonus included.

    Args:
      setting: chain or tree.
      acceptance: ``a_d``, the chance that the first guess at depth d is right once its
        parent is; the last value holds for all deeper ones. In a tree guess k (from 0)
        is right with ``a (1 - a)^k``, each a chance at what the ones before missed, and
        the tree is the best one for these chances (``tree.best_first``).
    """
    known = checks.array("acceptance", acceptance, 1, high=1)
    if not len(known):
        raise ValueError("acceptance is empty; give at least one value in [0, 1]")
    at = np.minimum(np.arange(setting.depth), len(known) - 1)
    chance = known[at]
    if setting.nodes == setting.depth + 1:
        return theory.expected_tau_chain(chance)
    ranks = chance[:, None] * (1 - chance[:, None]) ** np.arange(_GUESSES)
    topology_ = tree.best_first(ranks, setting.nodes)
    pairs = zip(topology_.level, topology_.rank, strict=True)
    accept = [0.0 if rank < 0 else ranks[depth - 1, rank] for depth, rank in pairs]
    return theory.expected_tau_tree(topology_.parent, accept)


def predict(
    config: Config,
    drafter: str,
    chip: str,
    settings: Sequence[Setting],
    *,
    batch: int = 1,
    length: int = 2048,
    devices: int = 1,
    acceptance: Sequence[float] | None = None,
    compile: bool | None = None,
) -> Table:
    """The costs of rounds, and with an acceptance profile the speed-ups.

    Args:
      config: the target.  drafter: a name of ``phases.DRAFTERS``.
      chip: a name of ``roofline.CHIPS``.  settings: chains and trees to predict.
      batch: sequences.  length: cached tokens of each.
      devices: of a tensor-parallel mesh.
      acceptance: see ``expected_tau``.
      compile: True to take XLA's figures, False for arithmetic; None compiles where it
        can: a TPU, ``libtpu`` installed, no loops of experts.

    Raises:
      ValueError: unknown names or bad numbers.  RuntimeError: ``compile=True`` without
        ``libtpu``.
    """
    if chip not in roofline.CHIPS:
        known = ", ".join(sorted(roofline.CHIPS))
        raise ValueError(f"chip {chip!r} is not one of {known}")
    batch, length = checks.count("batch", batch, 1), checks.count("length", length, 1)
    devices = checks.count("devices", devices, 1)
    possible = chip in topology.TPUS and config.experts is None
    if compile and not possible:
        raise ValueError(
            f"{chip} with {config.family}: compiled figures are for TPUs and models "
            "without experts, whose loops XLA counts once"
        )
    if compile is None:
        compile = possible and topology.installed()
    mesh = topology.tpu_mesh(chip, devices) if compile else None
    peak = roofline.CHIPS[chip]
    if mesh is not None and chip == "tpu7x":  # JAX shows it as two devices
        peak = dataclasses.replace(
            peak, flops=peak.flops / 2, bandwidth=peak.bandwidth / 2
        )
    every = (None, *settings)
    least = [arithmetic(config, drafter, s, batch, length, devices) for s in every]
    bounds = [{name: c.bound(peak) for name, c in costs.items()} for costs in least]
    found = least
    if mesh is not None:
        found = [compiled(config, drafter, s, mesh, batch, length) for s in every]
    rows = []
    for setting, costs, bound in zip(every, found, bounds, strict=True):
        tau = None
        if setting is not None and acceptance is not None:
            tau = expected_tau(setting, acceptance)
        rows.append(Prediction(setting, costs, bound, tau))
    kernel = "none compiled"
    if mesh is not None:
        kernel = "Pallas (tpu)" if devices == 1 else "XLA"
    return Table(rows[0], tuple(rows[1:]), mesh is not None, kernel)


# --- XLA's figures --------------------------------------------------------------------


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
    taps = 3 if drafter == "eagle3" and setting is not None else 0

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


# The axis that tensor parallelism splits, by the name of a weight or cache.
_SPLIT = {
    "qkv": 0,
    "q_b": 0,
    "kv_b": 0,
    "out": 1,
    "gate_up": 1,
    "down": 1,
    "embed": 0,
    "head": 0,
    "k": 1,
    "v": 1,
}


def _split(path, shape: tuple[int, ...], devices: int) -> PartitionSpec:
    names = [getattr(key, "name", None) for key in path]
    axis = next((_SPLIT[n] for n in reversed(names) if n in _SPLIT), None)
    if axis is None or axis >= len(shape) or shape[axis] % devices:
        return PartitionSpec()
    return PartitionSpec(*[None] * axis, topology.AXIS)


# --- arithmetic -----------------------------------------------------------------------


def arithmetic(
    config: Config,
    drafter: str,
    setting: Setting | None,
    batch: int,
    length: int,
    devices: int,
) -> dict[str, Cost]:
    """The costs of every phase in closed form, split evenly over the devices.

    FLOPs: two a multiply-add of every product, attention of each row to the cache and to
    the block. Bytes: weights once a forward (of experts those that some row is expected to
    choose, of an embedding nothing), the live cache, logits. Activations stay on the chip.
    """
    nodes = 1 if setting is None else setting.nodes
    weights = phases.target_weights(config)
    head = weights.embed if weights.head is None else weights.head
    memory = _bytes(weights) + _cache_bytes(config, batch, length + SLACK, full=True)
    drafted = None
    if setting is not None:
        drafted = phases.drafting(drafter, config, setting).params
    own = None if drafted is None else dataclasses.replace(drafted, embed=None)
    if own is not None and own.head.shape == head.shape:
        memory -= _bytes(head)  # the same array
    memory += _bytes(own)
    rows = batch * nodes
    score = _forward(config, weights.layers, batch, nodes, length)
    score += _product(head, rows)
    logits = 4.0 * rows * config.vocab_size
    score += Cost(0, logits)
    kv = _cache_bytes(config, batch, nodes, full=True)
    costs = {
        "score": score,
        "append": Cost(0, 2 * kv),
        "accept": Cost(rows * config.vocab_size, logits),
        "propose": Cost(),
        "update": Cost(),
    }
    if own is not None and setting is not None:
        layer = phases.select(config, (config.layers - 1,))

        def step(wide: int) -> Cost:
            forward = _forward(layer, own.layers, batch, wide, length)
            return forward + _product(own.fc, batch * wide)

        wide = 1 if setting.nodes == setting.depth + 1 else _GUESSES
        # The first guesses come from the pair that `update` left.
        propose = _product(own.head, batch)
        propose += (step(wide) + _product(own.head, batch * wide)) * (setting.depth - 1)
        costs |= {"propose": propose, "update": step(setting.depth + 1)}
    return {
        name: Cost(c.flops / devices, c.moved / devices, None, memory / devices)
        for name, c in costs.items()
    }


def _forward(config: Config, layers, batch: int, nodes: int, length: int) -> Cost:
    """The layers of a model on ``nodes`` rows a sequence, embedding and head left out."""
    rows, total = batch * nodes, Cost()
    for leaf, path in _leaves(layers):
        share = chosen = 1.0
        experts = config.experts
        if experts is not None and _is_expert(path, leaf, experts.count):
            chosen = experts.per_token / experts.count
            share = 1 - (1 - chosen) ** rows
        flops = 2.0 * leaf.size * chosen * rows if len(leaf.shape) > 1 else 0.0
        total += Cost(flops, _bytes(leaf) * share)
    pair = 4.0 * config.heads * config.head_dim
    if config.latent is not None:
        pair = 2.0 * config.heads * (2 * config.latent.rank + config.latent.rope_dim)
    seen = [length if w is None else min(length, w) for w in config.windows]
    pairs = sum(rows * (s + nodes) for s in seen)
    return total + Cost(pair * pairs, _cache_bytes(config, batch, length))


def _cache_bytes(config: Config, batch: int, tokens: int, full: bool = False) -> float:
    """Bytes of ``tokens`` cached tokens; ``full`` counts those beyond windows too."""
    one = 2 * config.kv_heads * config.head_dim
    if config.latent is not None:
        one = config.latent.rank + config.latent.rope_dim
    seen = [tokens if w is None or full else min(tokens, w) for w in config.windows]
    return float(batch * sum(seen) * one * jnp.dtype(phases.DTYPE).itemsize)


def _product(weight, rows: int) -> Cost:
    return Cost(2.0 * weight.size * rows, _bytes(weight))


def _leaves(tree_: Any):
    for path, leaf in jax.tree.leaves_with_path(tree_):
        yield leaf, [getattr(key, "name", None) for key in path]


def _is_expert(path: list, leaf, count: int) -> bool:
    stacked = path[-1] in ("gate_up", "down") and len(leaf.shape) > 2
    return stacked and "shared" not in path and leaf.shape[0] == count


def _bytes(tree_: Any) -> float:
    leaves = jax.tree.leaves(tree_)
    return float(sum(x.size * x.dtype.itemsize for x in leaves))
