"""The adaptive rule on simulated engines: never much slower than plain decoding."""

import random

import pytest

from jspec.serve.adaptive import (
    BUDGET,
    Cost,
    Governor,
    History,
    observe,
    rest,
    speculate,
)


def simulate(cost, tau, rounds=5000):
    """Seconds a token relative to plain decoding, and the share of drafted rounds.

    ``tau``: tokens a drafted round emits, from the number of the round.
    """
    history, paused = History.start(cost), False
    seconds = tokens = drafts = 0.0
    for n in range(rounds):
        if speculate(history, cost):
            seconds += cost.drafted + paused * cost.resume
            history = observe(history, cost, drafted=True, tau=tau(n), resumed=paused)
            tokens, drafts, paused = tokens + tau(n), drafts + 1, False
        else:
            seconds, tokens, paused = seconds + cost.plain, tokens + 1, True
            history = rest(history)
    return seconds / tokens / cost.plain, drafts / rounds


@pytest.mark.parametrize("resume", [0.0, 5.0])
@pytest.mark.parametrize("drafted", [1.05, 1.5, 2.0, 4.0, 20.0])
@pytest.mark.parametrize("tau", [1.0, 1.4, 1.9])
def test_it_is_never_slower_than_plain_by_more_than_2_percent(drafted, tau, resume):
    slower, _ = simulate(Cost(1.0, drafted, drafted, resume), lambda n: tau)
    assert slower < 1.02


def test_it_drafts_whenever_that_pays():
    faster, share = simulate(Cost(1.0, 1.5, 1.5, 1.0), lambda n: 3.0)
    assert faster == pytest.approx(0.5) and share == 1


def test_the_first_try_waits_until_the_account_can_pay_it():
    cheap, dear = Cost(1.0, 1.5, 1.5), Cost(1.0, 1.6, 1.6)
    assert speculate(History.start(cheap), cheap)
    history, rounds = History.start(dear), 0
    while not speculate(history, dear):
        history, rounds = rest(history), rounds + 1
    assert rounds == pytest.approx(0.6 / BUDGET, abs=1)
    lookup = dear._replace(idle=1.0)
    assert speculate(History.start(lookup), lookup)


def test_it_comes_back_when_the_text_becomes_easy():
    cost = Cost(1.0, 1.5, 1.5, 1.0)
    _, share = simulate(cost, lambda n: 1.1 if n < 2500 else 3.0)
    assert 0.4 < share < 0.55


@pytest.mark.parametrize("drafted", [1.3, 1.7, 2.4])
def test_luck_does_not_make_it_draft_at_a_loss(drafted):
    """Near the break-even a mean of few rounds is often above 1."""
    chance = random.Random(0)
    tokens = [chance.choice((1, 1, 2, 4)) for _ in range(5000)]  # 2 in the mean
    slower, _ = simulate(Cost(1.0, drafted, drafted), lambda n: tokens[n] * 0.8)
    assert slower < 1.02


def test_it_stops_soon_when_the_text_becomes_hard():
    """However much drafting has saved before."""
    cost, history = Cost(1.0, 1.5, 1.5), History()
    for _ in range(5000):
        history = observe(history, cost, drafted=True, tau=3.0)
    rounds = 0
    while speculate(history, cost):
        history = observe(history, cost, drafted=True, tau=1.0)
        rounds += 1
    assert rounds < 25


def test_rounds_in_which_nothing_was_found_cost_what_they_cost():
    cost = Cost(plain=1.0, drafted=2.0, idle=1.0)
    history = observe(History(), cost, drafted=False, tau=1.0)
    assert history == History(gain=1.0, account=2.005)
    assert speculate(history, cost)


def test_the_account_pays_what_a_round_took():
    """Unless it was held up: that says nothing of drafting."""
    cost = Cost(plain=1.0, drafted=2.0, idle=1.0, resume=1.0)
    said = dict(drafted=True, tau=1.0, resumed=True)
    mean, slow, held_up = (
        observe(History(), cost, seconds=s, **said).account for s in (None, 6.0, 60.0)
    )
    assert mean - slow == pytest.approx(3 * (1 - BUDGET))
    assert held_up == mean


def test_costs_are_those_of_the_latest_rounds():
    """But not of a round that was held up, nor of one that was not timed."""
    governor = Governor({4: Cost(1.0, 1.5, 1.5, 0.5)}, always=False)
    note = dict(drafted=True, tau=2.0, resumed=False)
    for _ in range(100):
        governor.learn(4, tried=True, seconds=2.4, **note)
        governor.learn(4, tried=True, seconds=60.0, **note)
        governor.learn(4, tried=False, seconds=None, **note)
    assert governor.costs[4].drafted == pytest.approx(2.4, rel=1e-3)
    assert governor.costs[4].plain == 1.0
    governor.learn(4, tried=True, seconds=3.4, **note | {"resumed": True})
    assert governor.costs[4].resume == pytest.approx(0.55, rel=1e-2)
    assert not governor.speculate(4)
