"""The adaptive rule on simulated engines: never much slower than plain decoding."""

import pytest

from jspec.serve.adaptive import Cost, History, observe, rest, speculate


def simulate(cost, tau, rounds=5000):
    """Seconds a token relative to plain decoding, and the share of drafted rounds.

    ``tau``: tokens a drafted round emits, from the number of the round.
    """
    history, paused = History(), False
    seconds = tokens = drafts = 0.0
    for n in range(rounds):
        if speculate(history, cost):
            seconds += cost.drafted + paused * cost.resume
            history = observe(history, cost, drafted=True, tau=tau(n), resumed=paused)
            tokens, drafts, paused = tokens + tau(n), drafts + 1, False
        else:
            seconds, tokens, paused = seconds + cost.plain, tokens + 1, True
            history = rest(history, cost)
    return seconds / tokens / cost.plain, drafts / rounds


@pytest.mark.parametrize("resume", [0.0, 5.0])
@pytest.mark.parametrize("drafted", [1.05, 1.5, 2.0, 4.0, 20.0])
@pytest.mark.parametrize("tau", [1.0, 1.4, 1.9])
def test_it_is_never_slower_than_plain_by_more_than_3_percent(drafted, tau, resume):
    slower, _ = simulate(Cost(1.0, drafted, drafted, resume), lambda n: tau)
    assert slower < 1.03


def test_it_drafts_whenever_that_pays():
    faster, share = simulate(Cost(1.0, 1.5, 1.5, 1.0), lambda n: 3.0)
    assert faster == pytest.approx(0.5) and share == 1


def test_it_comes_back_when_the_text_becomes_easy():
    cost = Cost(1.0, 1.5, 1.5, 1.0)
    _, share = simulate(cost, lambda n: 1.1 if n < 2500 else 3.0)
    assert 0.4 < share < 0.55


def test_rounds_in_which_nothing_was_found_cost_what_they_cost():
    cost = Cost(plain=1.0, drafted=2.0, idle=1.0)
    history = observe(History(), cost, drafted=False, tau=1.0)
    assert history == History(gain=1.0, spent=1.0, lost=0.0)
    assert speculate(history, cost)
