"""When a batch should speculate: measured cost of a round against tokens gained.

A round with drafts that takes c seconds and emits tau tokens a request does the work of
tau plain rounds of p seconds; it pays while ``tau p > c``. Both costs are measured when
the engine starts, tau is watched. Where drafts do not pay they are tried now and then, as
often as a budget of lost time allows: so the engine is never slower than plain decoding
by more than that budget, whatever the drafter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

BUDGET = 0.02  # of all time may be lost by trying
_NEWEST = 0.2  # weight of the latest round in the mean


class Cost(NamedTuple):
    """Seconds of a round for one size of the batch.

    Attributes:
      plain: without drafts.  drafted: with drafts.
      idle: of the drafter's rounds in which it found nothing to propose.
      resume: to bring the drafter's state up to date after a pause.
    """

    plain: float
    drafted: float
    idle: float
    resume: float = 0.0


class History(NamedTuple):
    """What is remembered of the rounds so far.

    Attributes:
      gain: mean of ``tau p / c`` over rounds with a drafter; infinite before the first.
      spent: seconds of all rounds.
      lost: seconds by which rounds with a drafter were slower than plain ones would have
        been, less what they saved since.
    """

    gain: float = float("inf")
    spent: float = 0.0
    lost: float = 0.0


def speculate(history: History, cost: Cost) -> bool:
    """Should the next round draft?"""
    if history.gain >= 1:
        return True
    risk = max(cost.drafted - cost.plain, 0.0) + cost.resume
    return history.lost + risk <= BUDGET * history.spent


def observe(
    history: History, cost: Cost, *, drafted: bool, tau: float, resumed: bool = False
) -> History:
    """The history after a round with a drafter.

    Args:
      history: before.  cost: of this size of batch.
      drafted: was anything proposed?
      tau: tokens emitted a running request.
      resumed: was it the first after a pause?
    """
    took = (cost.drafted if drafted else cost.idle) + resumed * cost.resume
    now = tau * cost.plain / took
    mean = history.gain + _NEWEST * (now - history.gain)
    return History(
        gain=now if history.gain == float("inf") else mean,
        spent=history.spent + took,
        lost=max(history.lost + took - tau * cost.plain, 0.0),
    )


def rest(history: History, cost: Cost) -> History:
    """The history after a plain round."""
    return history._replace(spent=history.spent + cost.plain)


class Governor:
    """The rule at work in an engine, with a history for every size of the batch.

    Args:
      costs: of the rounds of every size.
      always: draft in every round, whatever it costs.
    """

    def __init__(self, costs: Mapping[int, Cost], always: bool):
        self.always, self._costs = always, costs
        self._history = {size: History() for size in costs}

    def speculate(self, size: int) -> bool:
        """Should the next round of this size draft?"""
        return self.always or speculate(self._history[size], self._costs[size])

    def learn(
        self, size: int, *, tried: bool, drafted: bool, tau: float, resumed: bool
    ) -> None:
        """Takes note of a round; ``tried`` says whether it had a drafter.

        The others are as for ``observe``.
        """
        history, cost = self._history[size], self._costs[size]
        if tried:
            new = observe(history, cost, drafted=drafted, tau=tau, resumed=resumed)
        else:
            new = rest(history, cost)
        self._history[size] = new
