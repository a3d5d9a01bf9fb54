"""What a generation did, counted after every cut."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counts over one row or over all rows of a generation.

    Attributes:
      rounds: target forwards over a block (prefill not counted).
      new_tokens: emitted tokens, after the cut at a stop and at the budget.
      tau: mean emitted tokens per target forward, the bonus included.
      proposed: drafts on the longest live path, summed over rounds.
      lengths: rounds with 0, 1, 2, .. drafts on their longest live path.
      accepted: emitted tokens beyond the one that a plain step would have given.
      acceptance_by_depth: for depth 1, 2, ..: of all rounds, the share that emitted
        more than this many tokens, so that ``tau = 1 + sum(acceptance_by_depth)``.
      seconds: wall time of the rounds.  prefill_seconds: wall time of prefill.
    """

    rounds: int
    new_tokens: int
    proposed: int
    lengths: tuple[int, ...]
    accepted: int
    acceptance_by_depth: tuple[float, ...]
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    rows: tuple[Stats, ...] = ()

    @property
    def tau(self) -> float:
        return self.new_tokens / self.rounds if self.rounds else 0.0

    @property
    def drafted_rounds(self) -> int:
        """Rounds in which anything was drafted."""
        return sum(self.lengths[1:])

    @property
    def tokens_per_s(self) -> float:
        return self.new_tokens / self.seconds if self.seconds else 0.0


def collect(
    emitted: np.ndarray,
    proposed: np.ndarray,
    depth: int,
    seconds: float = 0.0,
    prefill_seconds: float = 0.0,
) -> Stats:
    """Statistics from the per-round record of a ``jspec.state.State``.

    Args:
      emitted: ``[B, T]`` tokens committed in each round, 0 after the last.
      proposed: ``[B, T]`` drafts on the longest live path of each round.
      depth: longest path the drafter can propose.
      seconds, prefill_seconds: wall time, given to the total only.
    """
    rows = [
        _count(e[e > 0], p[e > 0], depth)
        for e, p in zip(emitted, proposed, strict=True)
    ]
    total = _count(emitted[emitted > 0], proposed[emitted > 0], depth)
    return dataclasses.replace(
        total, seconds=seconds, prefill_seconds=prefill_seconds, rows=tuple(rows)
    )


def _count(emitted: np.ndarray, proposed: np.ndarray, depth: int) -> Stats:
    rounds = len(emitted)
    return Stats(
        rounds=rounds,
        new_tokens=int(emitted.sum()),
        proposed=int(proposed.sum()),
        lengths=tuple(np.bincount(proposed, minlength=depth + 1).tolist()),
        accepted=int((emitted - 1).sum()),
        acceptance_by_depth=tuple(
            float(np.mean(emitted > d)) if rounds else 0.0 for d in range(1, depth + 1)
        ),
    )


def merge(parts: Sequence[Stats]) -> Stats:
    """The statistics of several generations together; seconds add up."""
    rounds, lengths = sum(p.rounds for p in parts), [p.lengths for p in parts]
    depth = max((len(p.acceptance_by_depth) for p in parts), default=0)

    def share(d: int) -> float:
        hits = sum(
            p.acceptance_by_depth[d] * p.rounds
            for p in parts
            if d < len(p.acceptance_by_depth)
        )
        return hits / rounds if rounds else 0.0

    return Stats(
        rounds=rounds,
        new_tokens=sum(p.new_tokens for p in parts),
        proposed=sum(p.proposed for p in parts),
        lengths=tuple(map(sum, itertools.zip_longest(*lengths, fillvalue=0))),
        accepted=sum(p.accepted for p in parts),
        acceptance_by_depth=tuple(share(d) for d in range(depth)),
        seconds=sum(p.seconds for p in parts),
        prefill_seconds=sum(p.prefill_seconds for p in parts),
        rows=tuple(r for p in parts for r in (p.rows or (p,))),
    )
