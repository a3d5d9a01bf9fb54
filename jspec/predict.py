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
from collections.abc import Sequence

import numpy as np

from jspec import checks, roofline, theory, topology, tree
from jspec.closed_form import GUESSES, Cost, arithmetic
from jspec.compiled import compiled
from jspec.models.config import Config
from jspec.phases import Setting


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

    @property
    def memory(self) -> float:
        """Bytes that a device holds at most. A compiled phase needs its own arguments
        alone: the target's and the drafter's are added, and shared arrays count twice."""
        rows = (self.plain, *self.rows)
        if not self.compiled:
            return max(row.memory for row in rows)
        return max(
            row.costs["score"].memory
            + max(row.costs[name].memory for name in ("propose", "update"))
            for row in rows
        )

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
    ranks = chance[:, None] * (1 - chance[:, None]) ** np.arange(GUESSES)
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
