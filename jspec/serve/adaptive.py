"""When a batch should speculate: measured cost of a round against tokens gained.

A round with drafts that takes c seconds and emits tau tokens a request does the work of
tau plain rounds of p seconds; it pays while ``tau p > c``. Both costs are measured when
the engine starts and in every round since, tau is watched. What drafting may lose is an
account: it is filled by a share of all time and by what drafting saves, and pays for
rounds that were slower than plain ones. Drafts go on while they pay and the account
holds; else they are tried when it has enough for one more round. By the costs it goes by, an
engine therefore loses no more than that share of its time and ``_MOST`` rounds, whatever
the drafter; what it loses by the clock is for ``benchmarks/adaptive.py`` to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

BUDGET = 0.005  # of all time may be lost by trying
_FIRST, _MOST = 2.0, 10.0  # plain rounds in the account: at the start, at most
_CHEAP = 1.5  # times a plain round: a drafter that costs more gets no credit
_NEWEST = 0.2  # weight of the latest round in the mean gain
_DRIFT = 0.1  # weight of the latest round in the mean cost
_UNKNOWN = float("inf")
_OUTLIER = 4.0  # a round beyond so many times its mean was held up by something else


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

    def measured(self, kind: str, seconds: float) -> Cost:
        """The costs after a round of a ``kind``, the name of a field."""
        mean = getattr(self, kind)
        if not _is_likely(seconds, mean):
            return self
        return self._replace(**{kind: mean + _DRIFT * (seconds - mean)})


class History(NamedTuple):
    """What is remembered of the rounds so far.

    Attributes:
      gain: mean of ``tau p / c`` over rounds with a drafter; infinite before the first,
        which is a try like any other.
      account: plain rounds that may yet be lost.
    """

    gain: float = _UNKNOWN
    account: float = _FIRST

    @classmethod
    def start(cls, cost: Cost) -> History:
        """Before the first round; the account is empty where a drafter is dear.

        One that looks drafts up is not: without a find its rounds are plain ones.
        """
        cheap = cost.idle <= _CHEAP * cost.plain
        return cls(account=_FIRST if cheap else 0.0)


def speculate(history: History, cost: Cost) -> bool:
    """Should the next round draft?"""
    if 1 <= history.gain < _UNKNOWN:
        return history.account > 0
    risk = max(cost.drafted - cost.plain, 0.0) + cost.resume
    return history.account * cost.plain >= risk


def observe(
    history: History,
    cost: Cost,
    *,
    drafted: bool,
    tau: float,
    resumed: bool = False,
    seconds: float | None = None,
) -> History:
    """The history after a round with a drafter.

    Args:
      history: before.  cost: of this size of batch.
      drafted: was anything proposed?
      tau: tokens emitted a running request.
      resumed: was it the first after a pause?
      seconds: it took. None, or what something else must have held up, counts as the
        costs say. The first rounds after a pause take longer than others do.
    """
    took = (cost.drafted if drafted else cost.idle) + resumed * cost.resume
    if seconds is not None and _is_likely(seconds, took):
        took = seconds
    rounds = took / cost.plain
    now = tau / rounds
    mean = history.gain + _NEWEST * (now - history.gain)
    gain = now if history.gain == _UNKNOWN else mean
    account = history.account + BUDGET * rounds + tau - rounds
    return History(gain, min(account, _MOST))


def _is_likely(seconds: float, mean: float) -> bool:
    return mean / _OUTLIER < seconds < mean * _OUTLIER


def rest(history: History) -> History:
    """The history after a plain round."""
    return history._replace(account=min(history.account + BUDGET, _MOST))


class Governor:
    """The rule at work in an engine, with costs and a history for every batch size.

    Args:
      costs: of the rounds of every size, as measured at the start.
      always: draft in every round, whatever it costs.
    """

    def __init__(self, costs: Mapping[int, Cost], always: bool):
        self.always, self.costs = always, dict(costs)
        self._history = {size: History.start(cost) for size, cost in costs.items()}

    def speculate(self, size: int) -> bool:
        """Should the next round of this size draft?"""
        return self.always or speculate(self._history[size], self.costs[size])

    def learn(
        self,
        size: int,
        *,
        tried: bool,
        drafted: bool,
        tau: float,
        resumed: bool,
        seconds: float | None,
    ) -> None:
        """Takes note of a round.

        Args:
          size: of the batch.  tried: did the round have a drafter?
          drafted, tau, resumed: as for ``observe``.
          seconds: it took, resuming included; None if that is not known.
        """
        if seconds is not None:
            cost = self.costs[size]
            kind = ("drafted" if drafted else "idle") if tried else "plain"
            if resumed:
                more = seconds - getattr(cost, kind)
                self.costs[size] = cost.measured("resume", more)
            else:
                self.costs[size] = cost.measured(kind, seconds)
        history, cost = self._history[size], self.costs[size]
        if tried:
            new = observe(
                history,
                cost,
                drafted=drafted,
                tau=tau,
                resumed=resumed,
                seconds=seconds,
            )
        else:
            new = rest(history)
        self._history[size] = new
