"""Closed forms: expected tau, the best draft length, the latency formula.

Everything rests on ``L = (T_draft + T_verify) / tau``: seconds a token from the seconds
of a round and the tokens it emits. tau counts the bonus token, so plain decoding has
tau = 1 and full acceptance of a chain has tau = gamma + 1. Plain floats, no tracing.
A value outside its range raises ``ValueError``. Rooflines are in ``jspec.roofline``.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jspec import checks


def _laws(p: ArrayLike, q: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    laws = np.asarray(p, dtype=np.float64), np.asarray(q, dtype=np.float64)
    if laws[0].ndim == 0 or laws[0].shape != laws[1].shape:
        shapes = f"{laws[0].shape} and {laws[1].shape}"
        raise ValueError(f"p and q must be [..., V] of one shape, got {shapes}")
    for name, law in zip("pq", laws, strict=True):
        checks.array(name, law.ravel(), 1)
        worst = np.max(np.abs(law.sum(-1) - 1), initial=0.0)
        if worst > 1e-3:  # room for float32 sums over a large vocabulary
            raise ValueError(f"rows of {name} must sum to 1, one is off by {worst:.3g}")
    return laws


# --- tau ------------------------------------------------------------------------------


def acceptance_rate(p: ArrayLike, q: ArrayLike) -> np.ndarray | float:
    """``sum_x min(p, q) = 1 - TV(p, q)``, the chance that one draft is accepted.

    ``p``, ``q``: ``[..., V]`` target and draft laws; returns ``[...]`` (its mean over
    prefixes is alpha). Source: Leviathan et al., arXiv 2211.17192, Corollary 3.6.
    """
    return np.minimum(*_laws(p, q)).sum(-1)


def expected_tau(alpha: float, gamma: int) -> float:
    """Tokens a round, ``(1 - alpha^(gamma+1)) / (1 - alpha)``, bonus included.

    A chain of ``gamma >= 0`` drafts, each accepted with probability ``alpha`` in [0, 1]
    once its predecessor is. Source: Leviathan et al., arXiv 2211.17192, Eq. (1).
    """
    return expected_tau_chain(
        [checks.real("alpha", alpha, 0, 1)] * checks.count("gamma", gamma)
    )


def expected_tau_chain(accept_by_depth: ArrayLike) -> float:
    """``1 + sum_i prod_{j<=i} a_j`` for measured acceptance ``a``, ``[G]`` in [0, 1].

    ``a_j`` is conditional: accepted at depth j, given acceptance at depth j - 1. (For
    shares of *all* rounds the sum is just one plus their sum.) Leviathan et al.,
    arXiv 2211.17192, Eq. (1) without the i.i.d. assumption.
    """
    accept = checks.array("accept_by_depth", accept_by_depth, 1, high=1)
    # Summed, not divided by 1 - alpha: exact at alpha = 1, no cancellation near it.
    return 1.0 + float(np.cumprod(accept).sum())


def expected_tau_tree(parent: ArrayLike, accept: ArrayLike) -> float:
    """Tokens a round of a tree: sum over nodes of the product of ``accept`` on the path.

    ``parent``: ``[N]`` ints, -1 at the root (node 0), ``parent[i] < i``. ``accept``:
    ``[N]``, the chance that node i is the child accepted at its parent, given that the
    parent is accepted; ``accept[0]`` is not read, the root counts 1. At most one child
    is accepted, so siblings sum to at most 1. Source: F(T) of Sequoia, Chen et al.,
    arXiv 2402.12374, section 3.1.
    """
    above = [checks.count("parent", i, -1) for i in np.asarray(parent)]
    chance = checks.array("accept", accept, 1, high=1)
    if len(above) != len(chance) or above[:1] != [-1]:
        raise ValueError(f"need N >= 1 of both, root first, got {above} and {chance}")
    reach, spent = [1.0], np.zeros(len(above))
    for node, up in enumerate(above[1:], start=1):
        if not 0 <= up < node:
            raise ValueError(f"parent[{node}] must be in [0, {node - 1}], got {up}")
        reach.append(reach[up] * float(chance[node]))
        spent[up] += chance[node]
    if spent.max() > 1 + 1e-6:
        raise ValueError(f"siblings' accept must sum to <= 1, got {spent.max():.6g}")
    return math.fsum(reach)


def expected_tau_chains(alpha: float, gamma: int, chains: int) -> float:
    """``(gamma + 1) - sum_{i=1..gamma} (1 - alpha^i)^chains``: the best of b chains.

    ``chains >= 1`` independent guesses of ``gamma`` tokens, each token accepted with
    probability ``alpha``; the longest accepted prefix wins. Source: the scaling law of
    Lookahead decoding, Fu et al., arXiv 2402.02057, section 4.
    """
    alpha, chains = checks.real("alpha", alpha, 0, 1), checks.count("chains", chains, 1)
    depths = range(1, checks.count("gamma", gamma) + 1)
    return 1.0 + math.fsum(1 - (1 - alpha**i) ** chains for i in depths)


def token_tau(ratios: ArrayLike) -> float:
    """tau of token-level verification from logged ratios: ``1 + E[sum_i P_i]``,
    ``P_i = prod_{j<=i} min(1, r_j)``.

    ``ratios``: ``[rounds, G]``, ``r_j = p_j(x_j) / q_j(x_j)`` of every draft, those after
    a rejection too; 0 pads a short draft. Leviathan et al., arXiv 2211.17192, Alg. 1.
    """
    ratios = np.minimum(_ratios(ratios), 1)
    return 1.0 + float(np.cumprod(ratios, axis=1).sum(1).mean())


def block_tau(ratios: ArrayLike) -> float:
    """tau of block verification: ``1 + E[sum_i P_i]``, ``P_i = min(1, P_{i-1} r_i)``.

    ``ratios`` as in ``token_tau``, which is never larger: here a ratio above 1 makes up
    for earlier ones below. Source: Sun et al., arXiv 2403.10444, Algorithm 2.
    """
    ratios = _ratios(ratios)
    keep, total = np.ones(len(ratios)), np.ones(len(ratios))
    for ratio in ratios.T:
        keep = np.minimum(1, keep * ratio)
        total += keep
    return float(total.mean())


def _ratios(ratios: ArrayLike) -> np.ndarray:
    array = checks.array("ratios", ratios, 2)
    if not len(array):
        raise ValueError("ratios must hold at least one round, got shape (0, ...)")
    return array


def max_acceptance(
    p: ArrayLike, q: ArrayLike, k: int, *, replace: bool = True
) -> float:
    """The most any lossless rule accepts of ``k`` drafts: ``1 + min_H (P(H) - Q(H))``.

    ``p``, ``q``: ``[V]``, V <= 12 (all 2^V token sets H are tried), small k; ``Q(H)`` is
    the chance that all k draws from q, with or without replacement, lie in H. (The bound
    for k fixed tokens is just their target mass.) Source: the dual of the optimal
    transport problem, Hu et al., arXiv 2502.18779.
    """
    p, q = _laws(p, q)
    size = len(p)
    if p.ndim != 1 or size > 12:
        raise ValueError(f"p and q must be [V] with V <= 12, got shape {p.shape}")
    k = checks.count("k", k, 1)
    if not replace and k > np.count_nonzero(q):
        raise ValueError(f"k must be <= {np.count_nonzero(q)}, q's support, got {k}")
    inside = (np.arange(1 << size)[:, None] >> np.arange(size)) & 1 == 1
    drafts = (inside @ q) ** k
    if not replace:
        drafts = np.zeros(1 << size)
        for draw in itertools.permutations(np.flatnonzero(q), k):
            # Each draw renormalises q over what the earlier ones left.
            left = 1 - np.cumsum([0.0, *q[list(draw[:-1])]])
            drafts += np.prod(q[list(draw)] / left) * inside[:, draw].all(1)
    return float(1 + np.min(inside @ p - drafts))


# --- speed ----------------------------------------------------------------------------


def latency_per_token(t_draft: float, t_verify: float, tau: float) -> float:
    """``L = (T_draft + T_verify) / tau``: seconds a token, from seconds a round."""
    seconds = checks.real("t_draft", t_draft) + checks.positive("t_verify", t_verify)
    return seconds / checks.real("tau", tau, 1)


def speedup(t_plain: float, t_draft: float, t_verify: float, tau: float) -> float:
    """Seconds of a plain step over ``latency_per_token``; > 1 is a gain."""
    return checks.positive("t_plain", t_plain) / latency_per_token(
        t_draft, t_verify, tau
    )


def walltime_improvement(alpha: float, gamma: int, cost: float) -> float:
    """``(1 - alpha^(gamma+1)) / ((1 - alpha) (gamma cost + 1))``: the speed-up when a
    block costs no more than a plain step.

    ``cost >= 0``: seconds of a draft step over a target step. Above 1 for some gamma iff
    ``alpha > cost``. Source: Leviathan et al., arXiv 2211.17192, Thm 3.8, Cor. 3.9.
    """
    return expected_tau(alpha, gamma) / (gamma * checks.real("cost", cost) + 1)


def operations_factor(alpha: float, gamma: int, cost_ops: float) -> float:
    """``(1 - alpha) (gamma cost_ops + gamma + 1) / (1 - alpha^(gamma+1))``: arithmetic
    operations a token, over plain decoding.

    ``cost_ops >= 0``: operations a token, drafter over target. Source: Leviathan et al.,
    arXiv 2211.17192, Theorem 3.11.
    """
    tau = expected_tau(alpha, gamma)
    return (gamma * checks.real("cost_ops", cost_ops) + gamma + 1) / tau


def optimal_gamma(
    alpha: float,
    cost: float,
    *,
    verify_cost: Callable[[int], Any] | ArrayLike | None = None,
    gamma_max: int = 64,
) -> tuple[int, float]:
    """The chain length with the largest speed-up, and that speed-up.

    Args:
      alpha: acceptance probability in [0, 1].  cost: draft step over plain step, >= 0.
      verify_cost: a block of n = gamma + 1 rows over a plain step: ``verify_cost(n)``,
        or an array whose entry n it is (so of length >= 2; entry 0 is not read, gamma
        goes no further than the array). Must be 1 at n = 1. None: 1 for every n.
      gamma_max: largest gamma tried.

    Returns:
      ``(gamma, speedup)``; ``(0, 1.0)``, "do not speculate", when nothing pays. Of
      equals the shortest. Source: Leviathan et al., arXiv 2211.17192, section 3.5, with
      ``L = (T_draft + T_verify) / tau`` in place of a constant verify cost.
    """
    alpha, cost = checks.real("alpha", alpha, 0, 1), checks.real("cost", cost)
    gamma_max = checks.count("gamma_max", gamma_max)
    cost_at = verify_cost if callable(verify_cost) else lambda n: 1.0
    if verify_cost is not None and not callable(verify_cost):
        curve = np.asarray(verify_cost, dtype=np.float64)
        if curve.ndim != 1 or len(curve) < 2:
            raise ValueError(f"verify_cost must be [n], n >= 2, got {curve.shape}")
        gamma_max, cost_at = min(gamma_max, len(curve) - 2), curve.__getitem__
    if abs(checks.positive("verify_cost at 1 row", cost_at(1)) - 1) > 1e-3:
        raise ValueError(f"verify_cost must be 1 at 1 row, got {cost_at(1)}")
    best = 0, 1.0
    for gamma in range(1, gamma_max + 1):
        rows = checks.positive(f"verify_cost at {gamma + 1} rows", cost_at(gamma + 1))
        gain = speedup(1.0, gamma * cost, rows, expected_tau(alpha, gamma))
        best = max(best, (gamma, gain), key=operator.itemgetter(1))
    return best
