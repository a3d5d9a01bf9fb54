"""Closed forms against published numbers, enumeration and linear programming."""

import itertools
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.optimize import linprog

from jspec import roofline, theory
from jspec.roofline import CHIPS, Chip, ModelCost

SMOL = ModelCost(
    hidden=576,
    layers=30,
    heads=9,
    kv_heads=3,
    head_dim=64,
    intermediate=1536,
    vocab=49152,
    tied=True,
)
LLAMA_8B = ModelCost(
    hidden=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14336,
    vocab=128256,
    tied=False,
)
ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
# Integer optimum gamma / speed-up for each cost and alpha, search capped at 40.
OPTIMA = {
    0.01: "5/1.88 7/2.30 9/2.97 14/4.23 24/7.49 40/12.5",
    0.02: "4/1.79 6/2.17 8/2.76 11/3.82 19/6.37 31/9.95",
    0.05: "3/1.63 4/1.92 6/2.35 8/3.09 13/4.67 21/6.60",
    0.1: "2/1.46 3/1.67 4/1.98 6/2.47 10/3.43 15/4.48",
    0.2: "1/1.25 2/1.40 3/1.58 4/1.87 7/2.37 10/2.87",
}


def law(rng, size):
    return rng.dirichlet(np.ones(size))


# --- tau ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alpha", "printed"),
    [
        (0.6, (2.176, 2.383, 2.458)),
        (0.8, (2.952, 3.689, 4.161)),
        (0.9, (3.439, 4.686, 5.695)),
    ],
)
def test_expected_tau_prints_the_known_values(alpha, printed):
    got = [round(theory.expected_tau(alpha, gamma), 3) for gamma in (3, 5, 7)]
    assert tuple(got) == printed


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.99, 1 - 1e-12])
@pytest.mark.parametrize("gamma", [0, 1, 9])
def test_expected_tau_is_the_closed_form(alpha, gamma):
    closed = (1 - alpha ** (gamma + 1)) / (1 - alpha)
    # The division itself loses digits near 1: 4 are left at 1 - 1e-12.
    tolerance = 1e-12 if alpha < 0.999 else 1e-3
    assert theory.expected_tau(alpha, gamma) == pytest.approx(closed, rel=tolerance)


def test_expected_tau_at_the_ends():
    assert theory.expected_tau(1.0, 7) == 8.0
    assert theory.expected_tau(1.0, 0) == 1.0
    assert theory.expected_tau(0.0, 7) == 1.0
    assert theory.expected_tau(0.0, 0) == 1.0


def test_chain_from_measured_acceptance():
    got = theory.expected_tau_chain([0.8, 0.5, 0.25])
    assert got == pytest.approx(1 + 0.8 + 0.4 + 0.1)
    assert theory.expected_tau_chain([]) == 1.0
    # Nothing after a depth that never accepts can count.
    assert theory.expected_tau_chain([0.8, 0.0, 1.0]) == pytest.approx(1.8)


def test_tree_by_hand_and_chain_as_tree():
    #   root -> a (.6) -> c (.5), root -> b (.3)
    assert theory.expected_tau_tree([-1, 0, 0, 1], [0, 0.6, 0.3, 0.5]) == 2.2
    accept = [0.9, 0.7, 0.2, 0.6]
    chain = theory.expected_tau_tree(np.arange(5) - 1, [0.5, *accept])
    assert chain == pytest.approx(theory.expected_tau_chain(accept), rel=1e-14)
    assert theory.expected_tau_tree([-1], [1.0]) == 1.0


def test_tree_matches_enumerated_walks():
    parent = [-1, 0, 0, 1, 1, 2, 3, 3]
    accept = np.array([1, 0.5, 0.3, 0.4, 0.35, 0.8, 0.6, 0.1])
    children = [[c for c in range(8) if parent[c] == node] for node in range(8)]

    def walk(node, depth):
        """(probability, emitted tokens) of every way a walk can end."""
        stop = 1 - sum(accept[c] for c in children[node])
        ends = [(stop, depth + 1)]
        for c in children[node]:
            ends += [(accept[c] * w, n) for w, n in walk(c, depth + 1)]
        return ends

    ends = walk(0, 0)
    assert sum(w for w, _ in ends) == pytest.approx(1)
    mean = sum(w * n for w, n in ends)
    assert theory.expected_tau_tree(parent, accept) == pytest.approx(mean, rel=1e-13)


@pytest.mark.parametrize(("gamma", "chains"), [(1, 1), (3, 1), (3, 3), (4, 2), (2, 5)])
def test_chains_match_enumeration(gamma, chains):
    alpha, mean = 0.37, 0.0
    for coins in itertools.product([0, 1], repeat=gamma * chains):
        grid = np.reshape(coins, (chains, gamma))
        best = np.cumprod(grid, axis=1).sum(1).max()
        mean += (
            alpha ** grid.sum() * (1 - alpha) ** (grid.size - grid.sum()) * (best + 1)
        )
    got = theory.expected_tau_chains(alpha, gamma, chains)
    assert got == pytest.approx(mean, rel=1e-12)


def test_one_chain_of_chains_is_the_chain_and_more_help():
    taus = [theory.expected_tau_chains(0.7, 6, b) for b in (1, 2, 8, 10_000)]
    assert taus[0] == pytest.approx(theory.expected_tau(0.7, 6), rel=1e-14)
    assert taus == sorted(set(taus))
    assert taus[-1] == pytest.approx(7, abs=1e-6)
    assert theory.expected_tau_chains(1.0, 6, 1) == 7


# --- laws and ratios ------------------------------------------------------------------


def test_acceptance_rate_is_one_minus_total_variation():
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(7), (2, 3)), rng.dirichlet(np.ones(7), (2, 3))
    got = theory.acceptance_rate(p, q)
    assert got.shape == (2, 3)
    np.testing.assert_allclose(got, 1 - abs(p - q).sum(-1) / 2, rtol=1e-13)
    assert theory.acceptance_rate([0.5, 0.5, 0], [0, 0.5, 0.5]) == 0.5
    assert theory.acceptance_rate([1.0, 0], [0, 1.0]) == 0


def weighted_ratios(gamma):
    """Ratios ``[rounds, gamma]`` whose plain mean is exactly the mean over X ~ q."""
    p, slots = np.array([0.2, 0.5, 0.3]), [0, 0, 1, 2]  # q = 1/2, 1/4, 1/4
    q = np.array([0.5, 0.25, 0.25])
    return p, q, (p / q)[list(itertools.product(slots, repeat=gamma))]


@pytest.mark.parametrize("gamma", [1, 2, 4])
def test_token_estimator_is_the_chain_formula(gamma):
    p, q, ratios = weighted_ratios(gamma)
    alpha = theory.acceptance_rate(p, q)
    expected = theory.expected_tau(alpha, gamma)
    assert theory.token_tau(ratios) == pytest.approx(expected, rel=1e-13)


def accepted_by_block_rule(p, q, ratios):
    """E[accepted | drafts] of the published rule itself: the last success of h_i."""
    keep, success = 1.0, []
    for i, ratio in enumerate(ratios):
        keep = min(1.0, keep * ratio)
        if i + 1 == len(ratios):
            success.append(keep)
        else:
            residual = np.maximum(keep * p - q, 0).sum()
            success.append(residual / (residual + 1 - keep) if residual else 0.0)
    fails = 1 - np.array(success)
    return sum(1 - fails[i:].prod() for i in range(len(ratios)))


@pytest.mark.parametrize("gamma", [1, 2, 4])
def test_block_estimator_is_the_mean_of_the_block_rule(gamma):
    p, q, ratios = weighted_ratios(gamma)
    mean = 1 + np.mean([accepted_by_block_rule(p, q, row) for row in ratios])
    assert theory.block_tau(ratios) == pytest.approx(mean, rel=1e-12)


def test_block_estimator_is_never_below_token():
    rng = np.random.default_rng(1)
    ratios = np.exp(rng.normal(size=(200, 6)))
    gains = [theory.block_tau([row]) - theory.token_tau([row]) for row in ratios]
    assert min(gains) >= -1e-12
    assert max(gains) > 0.1
    # With one draft, or ratios that never exceed 1, there is nothing to make up for.
    for equal in (ratios[:, :1], np.minimum(ratios, 1)):
        token = theory.token_tau(equal)
        assert theory.block_tau(equal) == pytest.approx(token, rel=1e-13)


def test_estimators_by_hand_with_a_padded_draft():
    ratios = [[0.5, 4.0, 0.0], [2.0, 0.5, 0.5]]
    token = 1 + ((0.5 + 0.5) + (1 + 0.5 + 0.25)) / 2
    block = 1 + ((0.5 + 1.0) + (1 + 0.5 + 0.25)) / 2
    assert theory.token_tau(ratios) == token
    assert theory.block_tau(ratios) == block


def best_transport(p, q, k, replace):
    """The largest mass that can flow from draft tuples to tokens they hold."""
    size, flows, supply = len(p), [], []
    for draw in itertools.product(range(size), repeat=k):
        if not replace and len(set(draw)) < k:
            continue
        left = [1 - sum(q[list(draw[:i])]) for i in range(k)]
        supply.append(np.prod(q[list(draw)] / (1 if replace else np.array(left))))
        flows += [(len(supply) - 1, x) for x in set(draw)]
    usage = np.zeros((len(supply) + size, len(flows)))
    for j, (source, token) in enumerate(flows):
        usage[source, j] = usage[len(supply) + token, j] = 1
    limits = np.concatenate([supply, p])
    return -linprog(-np.ones(len(flows)), A_ub=usage, b_ub=limits).fun


@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_max_acceptance_is_the_optimal_transport(k, replace):
    rng = np.random.default_rng(k)
    p, q = law(rng, 4), law(rng, 4)
    got = theory.max_acceptance(p, q, k, replace=replace)
    assert got == pytest.approx(best_transport(p, q, k, replace), abs=1e-9)
    if k == 1:
        assert got == pytest.approx(theory.acceptance_rate(p, q))


def test_max_acceptance_bounds_recursive_rejection():
    rng = np.random.default_rng(5)
    p, q, now, reject = law(rng, 5), law(rng, 5), None, 1.0
    now = p
    for _ in range(3):  # i.i.d. children, judged one after the other
        reject *= 1 - theory.acceptance_rate(now, q)
        now = np.maximum(now - q, 0)
        now = now / now.sum()
    assert 1 - reject < theory.max_acceptance(p, q, 3) < 1
    # All of q's support drawn, and it covers p: one of the drafts can always stay.
    everything = theory.max_acceptance(p, q, 5, replace=False)
    assert everything == pytest.approx(1, abs=1e-12)


# --- speed ----------------------------------------------------------------------------


@pytest.mark.parametrize("cost", OPTIMA)
def test_optimal_gamma_table(cost):
    for alpha, cell in zip(ALPHAS, OPTIMA[cost].split(), strict=True):
        gamma, printed = cell.split("/")
        got_gamma, got = theory.optimal_gamma(alpha, cost, gamma_max=40)
        assert got_gamma == int(gamma), alpha
        decimals = len(printed.split(".")[1])
        assert f"{got:.{decimals}f}" == printed, alpha


def test_the_cap_binds_only_below_the_optimum():
    # The table's search ended at 40, which happens to be the optimum of that cell.
    assert theory.optimal_gamma(0.95, 0.01)[0] == 40
    gain = theory.walltime_improvement(0.95, 30, 0.01)
    assert theory.optimal_gamma(0.95, 0.01, gamma_max=30) == (30, pytest.approx(gain))
    assert theory.optimal_gamma(0.99, 0.001)[0] == 64


@pytest.mark.parametrize(
    ("alpha", "gamma", "operations", "speed"),
    [
        (0.6, 2, 1.53, 1.96),
        (0.7, 3, 1.58, 2.53),
        (0.8, 2, 1.23, 2.44),
        (0.8, 5, 1.63, 3.69),
        (0.9, 2, 1.11, 2.71),
        (0.9, 10, 1.60, 6.86),
    ],
)
def test_free_drafter_as_in_leviathan_table_1(alpha, gamma, operations, speed):
    assert round(theory.operations_factor(alpha, gamma, 0), 2) == operations
    assert round(theory.walltime_improvement(alpha, gamma, 0), 2) == speed


def test_operations_by_hand():
    # Everything accepted: gamma drafts and gamma + 1 rows for gamma + 1 tokens.
    assert theory.operations_factor(1.0, 4, 0.25) == (4 * 0.25 + 5) / 5
    # Nothing accepted: all of it for one token.
    assert theory.operations_factor(0.0, 4, 0.25) == 4 * 0.25 + 5


@pytest.mark.parametrize("cost", [0.05, 0.3, 0.75])
@pytest.mark.parametrize("margin", [-0.04, 0.0, 0.04])
def test_improvement_iff_alpha_exceeds_cost(cost, margin):
    alpha = cost + margin
    gamma, gain = theory.optimal_gamma(alpha, cost)
    if margin > 0:
        assert gamma >= 1
        assert gain >= (1 + alpha) / (1 + cost) > 1
    else:
        assert (gamma, gain) == (0, 1.0)
        for length in range(1, 20):
            assert theory.walltime_improvement(alpha, length, cost) <= 1


def test_latency_formula_agrees_with_leviathan():
    alpha, gamma, cost, plain = 0.8, 4, 0.1, 0.02
    tau = theory.expected_tau(alpha, gamma)
    draft = gamma * cost * plain
    got = theory.speedup(plain, draft, plain, tau)
    assert got == pytest.approx(theory.walltime_improvement(alpha, gamma, cost))
    latency = theory.latency_per_token(t_draft=0.01, t_verify=0.05, tau=3)
    assert latency == pytest.approx(0.02)
    assert theory.speedup(0.03, 0.01, 0.05, 3) == pytest.approx(1.5)


def test_verify_cost_moves_the_optimum():
    free = theory.optimal_gamma(0.8, 0.05)
    flat = theory.optimal_gamma(0.8, 0.05, verify_cost=lambda n: 1.0)
    assert flat == free
    rows = [1, 2, 4, 8, 16, 32, 64, 128]
    cost = [1, 1.3, 1.5, 1.67, 2.1, 3.0, 5.0, 9.0]
    gamma, gain = theory.optimal_gamma(
        0.8, 0.05, verify_cost=lambda n: np.interp(n, rows, cost)
    )
    tau = theory.expected_tau(0.8, gamma)
    by_hand = tau / (gamma * 0.05 + np.interp(gamma + 1, rows, cost))
    assert gain == pytest.approx(by_hand)
    assert 1 < gain < free[1]
    assert 0 < gamma < free[0]
    # Every row costs a whole step: not even a perfect drafter gains.
    assert theory.optimal_gamma(1.0, 0.0, verify_cost=float) == (0, 1.0)


def test_verify_cost_array_is_indexed_by_rows():
    # Three rows are as cheap as one, four are not: gamma = 2.
    curve = [np.nan, 1.0, 1.0, 1.0, 9.0, 9.0]
    gamma, gain = theory.optimal_gamma(0.9, 0.0, verify_cost=curve)
    assert (gamma, gain) == (2, pytest.approx(2.71))
    # gamma stops where the array stops.
    assert theory.optimal_gamma(0.9, 0.0, verify_cost=curve[:3])[0] == 1
    assert theory.optimal_gamma(0.9, 0.0, verify_cost=curve[:2]) == (0, 1.0)
    assert theory.optimal_gamma(0.9, 0.0, gamma_max=0) == (0, 1.0)


# --- rooflines ------------------------------------------------------------------------


def test_parameters_of_published_models():
    layer = 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536 + 2 * 576
    assert SMOL.parameters == 49152 * 576 + 30 * layer + 576 == 134_515_008
    assert LLAMA_8B.parameters == 8_030_261_248  # as printed by its publishers
    assert SMOL.weight_bytes == 269_030_016
    assert SMOL.kv_bytes_per_token == 2 * 30 * 3 * 64 * 2
    assert LLAMA_8B.kv_bytes_per_token == 131_072


def test_tying_changes_memory_not_work():
    sizes = {**vars(SMOL), "tied": False}
    untied = ModelCost(**sizes)
    assert untied.parameters - SMOL.parameters == 49152 * 576
    work = {"rows": 5, "length": 100, "batch": 2}
    assert roofline.step_cost(untied, **work) == roofline.step_cost(SMOL, **work)


def test_from_config_reads_the_names_of_a_config():
    config = SimpleNamespace(
        vocab_size=49152,
        hidden=576,
        layers=30,
        heads=9,
        kv_heads=3,
        head_dim=64,
        intermediate=1536,
        tie_embeddings=True,
    )
    assert ModelCost.from_config(config) == SMOL
    small = ModelCost.from_config(config, bytes_per_weight=0.625, bytes_per_cache=4)
    assert small.weight_bytes == 134_515_008 * 0.625
    assert small.kv_bytes_per_token == 2 * SMOL.kv_bytes_per_token
    for name in ("experts", "latent"):
        setattr(config, name, "there")
        with pytest.raises(ValueError, match=f"{name} = there"):
            ModelCost.from_config(config)
        setattr(config, name, None)


def test_step_cost_is_the_list_of_products():
    model = ModelCost(
        hidden=6,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=3,
        intermediate=5,
        vocab=11,
        bytes_per_weight=4,
        bytes_per_cache=2,
    )
    rows, length, batch = 3, 10, 2
    flops, moved = roofline.step_cost(model, rows=rows, length=length, batch=batch)
    # (in, out) of each product a row takes part in.
    layer = [(6, 12), (6, 6), (6, 6), (12, 6), (6, 5), (6, 5), (5, 6)]
    products = 2 * layer + [(6, 11)]
    dense = sum(2 * i * o for i, o in products)
    # Scores and mixture: 4 heads of 3 numbers over 10 cached and 3 own keys, 2 layers.
    attention = 2 * 2 * (2 * 4 * 3 * (10 + 3))
    assert flops == rows * batch * (dense + attention)
    weights = sum(i * o for i, o in products) + 5 * 6 + rows * batch * 6
    cache = 2 * 2 * 2 * 3 * (batch * length + rows * batch)
    assert moved == 4 * weights + 2 * cache + 4 * rows * batch * 11


def test_a_plain_step_costs_two_flops_a_weight():
    flops, moved = roofline.step_cost(SMOL, rows=1, length=0)
    embedded = SMOL.parameters - SMOL.norm_weights  # tied: the table is the head
    assert flops == 2 * embedded + 4 * 30 * 9 * 64
    assert moved == pytest.approx(SMOL.weight_bytes, rel=2e-3)
    assert roofline.arithmetic_intensity(flops, moved) == pytest.approx(1, rel=3e-3)


def test_roofline_is_the_slower_of_two():
    chip = Chip("toy", flops=100.0, bandwidth=10.0)
    assert chip.ridge == 10
    assert roofline.roofline_seconds(200, 10, chip) == 2
    assert roofline.roofline_seconds(100, 50, chip) == 5
    assert roofline.roofline_seconds(100, 10, chip) == 1


def test_ridge_points_of_known_chips():
    # Bytes and FLOPs a second are in base units: ridges are a few hundred.
    known = {"v5e": 240, "v5p": 166, "v6e": 560, "tpu7x": 313}
    known |= {"a100": 153, "h100": 295, "h200": 206}
    for name, ridge in known.items():
        assert CHIPS[name].ridge == pytest.approx(ridge, rel=5e-3)
    for name, chip in CHIPS.items():
        assert 100 < chip.ridge < 600, name


def test_smollm_on_a_measured_cpu():
    # 540 MB of float32 weights at 28 GB/s are the 19 ms measured on two cores.
    sizes = {**vars(SMOL), "bytes_per_weight": 4, "bytes_per_cache": 4}
    cost = roofline.step_cost(ModelCost(**sizes), rows=1, length=256)
    seconds = roofline.roofline_seconds(*cost, Chip("2 cores", 1e11, 28e9))
    assert seconds == pytest.approx(0.0197, rel=0.02)


def test_verify_curve_is_flat_below_the_ridge_and_linear_above():
    chip = CHIPS["v5e"]
    curve = roofline.verify_curve(LLAMA_8B, chip, [1, 8, 64, 1024, 2048], length=0)
    assert curve[0] == 1
    assert list(curve) == sorted(curve)
    assert curve[1] < 1.01 and curve[2] < 1.03
    # bfloat16: two FLOPs for two bytes a weight, so the corner is near ridge rows.
    assert curve[3] == pytest.approx(1024 / chip.ridge, rel=0.1)
    assert curve[4] > 1.9 * curve[3]


def test_verify_curve_takes_one_number():
    one = roofline.verify_curve(SMOL, CHIPS["h100"], 8, length=512)
    assert np.ndim(one) == 0
    assert one == roofline.verify_curve(SMOL, CHIPS["h100"], [8], length=512)[0]


def test_verify_curve_in_a_batch_depends_on_the_length():
    # A batch makes a block dear; long caches, read once for all its rows, cheap again.
    curve = partial(roofline.verify_curve, SMOL, CHIPS["h100"], 8)
    assert 1 < curve(length=0) < 1.02
    assert curve(length=0, batch=256) > 3
    assert 1 < curve(length=4096, batch=256) < 1.1


def test_speculation_pays_alone_and_not_in_a_full_batch():
    alone = partial(roofline.verify_curve, LLAMA_8B, CHIPS["v5e"], length=512)
    gamma, gain = theory.optimal_gamma(0.8, 0.05, verify_cost=alone)
    free_gamma, free_gain = theory.optimal_gamma(0.8, 0.05)
    assert gamma == free_gamma
    assert 0.95 * free_gain < gain < free_gain
    full = partial(roofline.verify_curve, LLAMA_8B, CHIPS["v5e"], length=0, batch=1024)
    assert theory.optimal_gamma(0.8, 0.05, verify_cost=full) == (0, 1.0)


# --- bad input ------------------------------------------------------------------------

HALF = [0.5, 0.5]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.expected_tau(1.1, 3), r"alpha .*\[0, 1\], got 1.1"),
        (lambda: theory.expected_tau(float("nan"), 3), r"alpha .*got nan"),
        (lambda: theory.expected_tau(0.5, -1), r"gamma .*>= 0, got -1"),
        (lambda: theory.expected_tau(0.5, 2.5), r"gamma .*integer .*got 2.5"),
        (lambda: theory.expected_tau_chain([0.5, 1.5]), r"accept_by_depth .*1\.5"),
        (lambda: theory.expected_tau_chain(0.5), r"accept_by_depth .*1 axes"),
        (lambda: theory.expected_tau_tree([-1, 0], [1]), r"root first"),
        (lambda: theory.expected_tau_tree([0, 0], HALF), r"root first"),
        (lambda: theory.expected_tau_tree([], []), r"N >= 1"),
        (lambda: theory.expected_tau_tree([-1, 1], HALF), r"parent\[1\] .*\[0, 0\]"),
        (lambda: theory.expected_tau_tree([-1, -1], HALF), r"parent\[1\] .*got -1"),
        (lambda: theory.expected_tau_tree([-1, 0.0], HALF), r"parent .*integer"),
        (lambda: theory.expected_tau_tree([-1, 0, 0], [1, 0.7, 0.4]), r"<= 1, got 1.1"),
        (lambda: theory.expected_tau_chains(0.5, 3, 0), r"chains .*>= 1, got 0"),
        (lambda: theory.acceptance_rate(HALF, [1.0]), r"one shape, got \(2,\)"),
        (lambda: theory.acceptance_rate([0.5, 0.4], HALF), r"rows of p .*0\.1"),
        (lambda: theory.acceptance_rate(HALF, [1.5, -0.5]), r"q must .*-0\.5"),
        (lambda: theory.acceptance_rate(1.0, 1.0), r"\[\.\.\., V\]"),
        (lambda: theory.token_tau([0.5, 0.5]), r"ratios .*2 axes"),
        (lambda: theory.block_tau([[0.5, -1.0]]), r"ratios .*got -1"),
        (lambda: theory.block_tau([[np.inf]]), r"ratios .*finite.*got inf"),
        (lambda: theory.token_tau(np.ones((0, 3))), r"at least one round"),
        (lambda: theory.max_acceptance(HALF, HALF, 0), r"k .*>= 1, got 0"),
        (
            lambda: theory.max_acceptance(HALF, [1, 0], 2, replace=False),
            r"k must be <= 1, .*got 2",
        ),
        (
            lambda: theory.max_acceptance(np.ones(13) / 13, np.ones(13) / 13, 1),
            r"V <= 12, got shape \(13,\)",
        ),
        (lambda: theory.latency_per_token(-1, 1, 2), r"t_draft .*got -1"),
        (lambda: theory.latency_per_token(1, 0, 2), r"t_verify .*> 0, got 0"),
        (lambda: theory.latency_per_token(1, 1, 0.9), r"tau .*\[1, inf\], got 0.9"),
        (lambda: theory.speedup(0, 1, 1, 2), r"t_plain .*> 0, got 0"),
        (lambda: theory.walltime_improvement(0.5, 2, -0.1), r"cost .*got -0.1"),
        (lambda: theory.operations_factor(0.5, 2, np.inf), r"cost_ops .*got inf"),
        (lambda: theory.optimal_gamma(2, 0.1, gamma_max=0), r"alpha .*got 2"),
        (lambda: theory.optimal_gamma(0.5, -1), r"cost .*got -1"),
        (lambda: theory.optimal_gamma(0.5, 0.1, gamma_max=-1), r"gamma_max .*got -1"),
        # A curve in milliseconds, one that starts at a single row, one too short.
        (
            lambda: theory.optimal_gamma(0.5, 0.1, verify_cost=[0, 31.0, 33.0]),
            r"1 at 1 row, got 31",
        ),
        (
            lambda: theory.optimal_gamma(0.5, 0.1, verify_cost=[1.0, 1.2, 1.4]),
            r"1 at 1 row, got 1\.2",
        ),
        (lambda: theory.optimal_gamma(0.5, 0.1, verify_cost=[1.0]), r"got \(1,\)"),
        (
            lambda: theory.optimal_gamma(0.5, 0.1, verify_cost=[0, 1, 0]),
            r"at 2 rows .*> 0, got 0",
        ),
        (lambda: Chip("x", 0, 1), r"flops .*> 0, got 0"),
        (lambda: Chip("x", 1, float("nan")), r"bandwidth .*got nan"),
        (lambda: ModelCost(**{**vars(SMOL), "layers": 0}), r"layers .*>= 1, got 0"),
        (lambda: ModelCost(**{**vars(SMOL), "heads": 8}), r"kv_heads = 3, got 8"),
        (lambda: ModelCost(**{**vars(SMOL), "bytes_per_weight": 0}), r"bytes_per_wei"),
        (lambda: roofline.step_cost(SMOL, rows=0, length=1), r"rows .*>= 1, got 0"),
        (lambda: roofline.step_cost(SMOL, rows=1, length=-1), r"length .*got -1"),
        (lambda: roofline.step_cost(SMOL, rows=1, length=1, batch=0), r"batch .*got 0"),
        (lambda: roofline.arithmetic_intensity(1, 0), r"bytes_moved .*> 0, got 0"),
        (lambda: roofline.roofline_seconds(-1, 1, CHIPS["v5e"]), r"flops .*got -1"),
        (
            lambda: roofline.verify_curve(SMOL, CHIPS["v5e"], [1, 2.5], length=0),
            r"rows .*integer .*got",
        ),
    ],
)
def test_bad_input_names_the_value_and_the_range(call, message):
    with pytest.raises(ValueError, match=message):
        call()
