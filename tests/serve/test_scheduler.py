"""Schedules: what they choose, and that they keep the target's law exactly."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec import verify
from jspec.drafters.loading import block_draft
from jspec.serve import costs, scheduler
from jspec.testing import Scheme, branching, emitted_laws, random_law, tiny
from jspec.train.block_starts import fresh_dflash, with_markov

POLICIES = [
    scheduler.early_stop,
    scheduler.stale_capacity,
    scheduler.columns,
    scheduler.first(1),
]
LINEAR = costs.table({1: 1.0, 64: 4.0})


def everyone(survival):
    return jnp.ones(len(survival), bool)


def brute_force(survival, table):
    """The lengths of largest throughput, by trying all numbers of rows."""
    requests, gamma = survival.shape
    entries = sorted(
        (-survival[r, j], j, r) for r in range(requests) for j in range(gamma)
    )
    best, chosen = -1.0, None
    for count in range(len(entries) + 1):
        tau = requests - sum(a for a, _, _ in entries[:count])
        rate = tau / float(table.at(jnp.float32(requests + count)))
        if rate > best + 1e-7:
            best, chosen = rate, entries[:count]
    lengths = np.zeros(requests, int)
    for _, _, r in chosen:
        lengths[r] += 1
    return lengths


@pytest.mark.parametrize("seed", range(6))
def test_early_stop_and_capacity_find_the_optimum_where_costs_are_convex(seed):
    random = np.random.default_rng(seed)
    now = np.asarray(scheduler.survival(random.uniform(size=(5, 4)).astype("float32")))
    table = costs.table({1: 1.0, 8: 1.1, 16: 1.6, 25: 3.0})
    want = brute_force(now, table)
    for policy in (scheduler.early_stop, scheduler.stale_capacity):
        got = policy(jnp.asarray(now), jnp.asarray(now), everyone(now), table)
        np.testing.assert_array_equal(got, want)


def test_a_staircase_stops_algorithm_1_and_not_the_stale_form():
    now = jnp.full((1, 4), 0.9)
    stairs = costs.table({1: 1.0, 2: 2.0, 5: 2.01})
    active = everyone(now)
    assert scheduler.early_stop(now, now, active, stairs).tolist() == [0]
    assert scheduler.stale_capacity(now, now, active, stairs).tolist() == [4]


def test_ties_go_to_earlier_positions_and_then_to_earlier_requests():
    now = jnp.ones((3, 2))
    assert scheduler.allocate(now, jnp.int32(4)).tolist() == [2, 1, 1]
    now = jnp.array([[0.5, 0.5], [0.9, 0.5]])
    assert scheduler.allocate(now, jnp.int32(2)).tolist() == [1, 1]


def test_drafts_without_a_chance_and_ended_requests_get_no_rows():
    now = scheduler.survival(jnp.array([[0.9, 0.0, 0.9], [0.9, jnp.nan, 0.9]]))
    np.testing.assert_allclose(now, [[0.9, 0, 0], [0.9, 0, 0]])
    assert scheduler.allocate(now, jnp.int32(6)).tolist() == [1, 1]
    free = costs.table({1: 1.0, 100: 1.001})
    for policy in POLICIES:
        out = policy(now, jnp.ones_like(now), jnp.array([False, True]), free)
        assert out[0] == 0 and out[1] >= 1


def test_a_negative_number_of_drafts_is_refused():
    with pytest.raises(ValueError, match="count"):
        scheduler.first(-1)


def test_survival_never_rises():
    chance = jax.random.uniform(jax.random.key(0), (64, 16), minval=0.999)
    chance = jnp.where(chance > 0.9998, 1.0, chance)
    assert np.all(np.diff(np.asarray(scheduler.survival(chance)), axis=1) <= 0)


def test_columns_gives_all_requests_one_length():
    now = scheduler.survival(jnp.array([[0.9, 0.9, 0.9], [0.9, 0.1, 0.1]]))
    cheap = costs.table({2: 1.0, 4: 1.2, 6: 1.3, 8: 3.0})
    assert scheduler.columns(now, now, everyone(now), cheap).tolist() == [2, 2]


# --- the law --------------------------------------------------------------------------


def leaky(now, stale, active, table):
    """The best of all numbers of rows by the present estimates."""
    del stale
    return scheduler.allocate(now, scheduler.capacity(now, active, table))


def scheduled_rule(policy, table, confidence, others, stale, rule):
    """``rule`` on chains cut by ``policy``, one request among ``others [R - 1, G]``.

    ``confidence``: table ``[V] * (G - 1) + [G]`` of chances, by the drafts before.
    """
    gamma = confidence.shape[-1]

    def judge(noise, block, target):
        if block.token.shape[0] > gamma + 1:
            raise ValueError("a longer chain than the confidences are for")
        at = tuple(block.token[1:gamma])
        mine = confidence[at]
        now = scheduler.survival(jnp.concatenate([mine[None], others]))
        length = policy(now, stale, everyone(now), table)[0]
        wanted = jnp.arange(block.live.shape[0]) <= length
        return rule(noise, block.replace(live=block.live & wanted), target)

    return judge


SPS = costs.table({1: 1.0, 2: 1 / 0.5, 3: 1 / 0.45})


def counterexample(policy):
    """DSpark's: p (.7, .3), q (.5, .5), c_1 .8, and c_2 .9 after A but 0 after B."""
    confidence = jnp.array([[0.8, 0.9], [0.8, 0.0]])
    none, stale = jnp.zeros((0, 2)), jnp.array([[0.8, 0.72]])
    rule = scheduled_rule(policy, SPS, confidence, none, stale, verify.token)
    scheme = Scheme(branching(1, 1), "replace", lambda prefix: np.array([0.5, 0.5]))
    return emitted_laws(rule, [(lambda prefix: np.array([0.7, 0.3]), scheme)])[0]


def test_the_published_counterexample_catches_the_leaky_scheduler():
    out = counterexample(leaky)
    assert out.distance == pytest.approx(0.15, abs=1e-6)
    np.testing.assert_allclose(out.law.sum((1, 2)), [0.85, 0.15], atol=1e-6)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_published_counterexample_does_not_bias_ours(policy):
    assert counterexample(policy).distance < 1e-6


# Costs of 3 to 9 rows whose first draft only pays if the second is taken as well.
STAIRS = costs.table({3: 1.0, 4: 1.4, 5: 1.42, 6: 3.0, 9: 9.0})


def distance(policy, seed, rule):
    """Exact distance of the law of one request in a batch of three."""
    random = np.random.default_rng(seed)
    chance = jnp.array([[0.8, 0.9], [0.8, 0.05], [0.8, 0.2]])
    others, stale = (
        scheduler.survival(jnp.asarray(random.uniform(0.1, 0.6, (r, 2)), jnp.float32))
        for r in (2, 3)
    )
    judge = scheduled_rule(policy, STAIRS, chance, others, stale, rule)
    scheme = Scheme(branching(1, 1), "replace", random_law(seed + 1000, 3))
    return emitted_laws(judge, [(random_law(seed, 3), scheme)])[0].distance


CASES = [(0, verify.token), (1, verify.block)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("seed", "rule"), CASES)
def test_schedules_keep_the_law_in_a_batch(policy, seed, rule):
    assert distance(policy, seed, rule) < 1e-6


@pytest.mark.parametrize(("seed", "rule"), CASES)
def test_the_leaky_scheduler_is_biased_in_the_same_batches(seed, rule):
    assert distance(leaky, seed, rule) > 1e-3


# --- a drafter under a schedule -------------------------------------------------------

MODEL = tiny.model(seed=3)
PROMPTS = [[1, 2, 3, 1, 2, 3], [5], [7, 8, 9]]


@pytest.mark.parametrize(
    "sizes", [{"widths": (1,)}, {"packs": (1, 4 / 3, 2)}], ids=["narrow", "packed"]
)
def test_coupled_text_of_a_scheduled_drafter_is_plain_sampling(sizes):
    small = jspec.load_drafter(tiny.model(seed=4), MODEL, gamma=3)
    draft = scheduler.schedule(small, LINEAR, **sizes)
    options = dict(max_new_tokens=16, temperature=0.7, seed=5)
    want = jspec.generate(MODEL, None, PROMPTS, **options)
    got = jspec.generate(MODEL, draft, PROMPTS, rule=verify.coupled, **options)
    assert got.tokens == want.tokens
    assert 0 < got.stats.proposed < 3 * got.stats.rounds


def test_a_drafter_with_a_confidence_head_is_cut_by_what_it_says():
    ids, key = np.arange(40, dtype=np.int32), jax.random.key(7)
    head = with_markov(fresh_dflash(MODEL, (0, 1), ids, 60, key, block=3), key, 4)
    spark = block_draft(head, "spark", MODEL)
    draft = scheduler.schedule_here(spark, MODEL, len(PROMPTS), context=8)
    assert draft.drafter.shape.packs == (1.0, 1.5, 2.0, 3.0)
    assert list(draft.params.table.rows) == [3, 6, 9, 12]
    sure = spark.params.confidence
    options = dict(max_new_tokens=12, temperature=0.7, seed=5)
    want = jspec.generate(MODEL, None, PROMPTS, **options)
    proposed = []
    for bias in (-9.0, 9.0):  # no draft is trusted, all are
        confident = dataclasses.replace(sure, bias=jnp.full_like(sure.bias, bias))
        params = dataclasses.replace(spark.params, confidence=confident)
        cut = spark._replace(params=params)
        cut = scheduler.schedule(cut, LINEAR, packs=(1.0, 2.0))
        got = jspec.generate(MODEL, cut, PROMPTS, rule=verify.coupled, **options)
        assert got.tokens == want.tokens
        proposed.append(got.stats.proposed / got.stats.rounds)
    assert proposed[0] < 0.5 and proposed[1] > 1.5


def test_what_cannot_be_scheduled_is_refused():
    ngram = jspec.Draft(jspec.drafters.ngram(gamma=3))
    with pytest.raises(ValueError, match="neither a confidence head"):
        scheduler.schedule(ngram, LINEAR)
    with pytest.raises(ValueError, match="a schedule cuts chains"):
        scheduler.schedule(jspec.Draft(jspec.no_drafts()), LINEAR)


@pytest.mark.parametrize("values", [[1.0], [1.0, 2.0, 3.0, 4.0], 1.0])
def test_temperatures_of_another_length_are_refused(values):
    with pytest.raises(ValueError, match="3 draft positions"):
        scheduler.temperatures(values, 3)


def test_temperatures():
    with pytest.raises(ValueError, match="position 2 must be finite and > 0"):
        scheduler.temperatures([1.0, 0.0], 2)
    got = scheduler.calibrated(
        jnp.array([[2.0, 2.0]]), scheduler.temperatures([1.0, 2.0], 2)
    )
    np.testing.assert_allclose(got, [[0.880797, 0.731059]], rtol=1e-5)
