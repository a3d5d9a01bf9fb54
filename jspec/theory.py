"""Closed forms: expected tau, the best draft length, the latency formula, rooflines.

Everything rests on ``L = (T_draft + T_verify) / tau``: seconds a token from the seconds
of a round and the tokens it emits. tau counts the bonus token, so plain decoding has
tau = 1 and full acceptance of a chain has tau = gamma + 1. Plain floats, no tracing.
A value outside its range raises ``ValueError``.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


def _real(name: str, value: Any, low: float = 0.0, high: float = math.inf) -> float:
    number = float(value)
    if not (low <= number <= high and math.isfinite(number)):
        raise ValueError(f"{name} must be finite and in [{low}, {high}], got {number}")
    return number


def _positive(name: str, value: Any) -> float:
    number = float(value)
    if not (number > 0 and math.isfinite(number)):
        raise ValueError(f"{name} must be finite and > 0, got {number}")
    return number


def _count(name: str, value: Any, low: int = 0) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = low - 1
    if number < low:
        raise ValueError(f"{name} must be an integer >= {low}, got {value!r}")
    return number


def _array(name: str, value: Any, ndim: int, high: float = math.inf) -> np.ndarray:
    array = np.asarray(value, dtype=np.float64)
    if array.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} axes, got shape {array.shape}")
    bad = array[~((array >= 0) & (array <= high) & np.isfinite(array))]
    if bad.size:
        raise ValueError(f"{name} must be finite and in [0, {high}], got {bad[0]}")
    return array


def _laws(p: ArrayLike, q: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    laws = np.asarray(p, dtype=np.float64), np.asarray(q, dtype=np.float64)
    if laws[0].ndim == 0 or laws[0].shape != laws[1].shape:
        shapes = f"{laws[0].shape} and {laws[1].shape}"
        raise ValueError(f"p and q must be [..., V] of one shape, got {shapes}")
    for name, law in zip("pq", laws, strict=True):
        _array(name, law.ravel(), 1)
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
    return expected_tau_chain([_real("alpha", alpha, 0, 1)] * _count("gamma", gamma))


def expected_tau_chain(accept_by_depth: ArrayLike) -> float:
    """``1 + sum_i prod_{j<=i} a_j`` for measured acceptance ``a``, ``[G]`` in [0, 1].

    ``a_j`` is conditional: accepted at depth j, given acceptance at depth j - 1. (For
    shares of *all* rounds the sum is just one plus their sum.) Leviathan et al.,
    arXiv 2211.17192, Eq. (1) without the i.i.d. assumption.
    """
    accept = _array("accept_by_depth", accept_by_depth, 1, high=1)
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
    above = [_count("parent", i, -1) for i in np.asarray(parent)]
    chance = _array("accept", accept, 1, high=1)
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
    alpha, chains = _real("alpha", alpha, 0, 1), _count("chains", chains, 1)
    depths = range(1, _count("gamma", gamma) + 1)
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
    array = _array("ratios", ratios, 2)
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
    k = _count("k", k, 1)
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
    seconds = _real("t_draft", t_draft) + _positive("t_verify", t_verify)
    return seconds / _real("tau", tau, 1)


def speedup(t_plain: float, t_draft: float, t_verify: float, tau: float) -> float:
    """Seconds of a plain step over ``latency_per_token``; > 1 is a gain."""
    return _positive("t_plain", t_plain) / latency_per_token(t_draft, t_verify, tau)


def walltime_improvement(alpha: float, gamma: int, cost: float) -> float:
    """``(1 - alpha^(gamma+1)) / ((1 - alpha) (gamma cost + 1))``: the speed-up when a
    block costs no more than a plain step.

    ``cost >= 0``: seconds of a draft step over a target step. Above 1 for some gamma iff
    ``alpha > cost``. Source: Leviathan et al., arXiv 2211.17192, Thm 3.8, Cor. 3.9.
    """
    return expected_tau(alpha, gamma) / (gamma * _real("cost", cost) + 1)


def operations_factor(alpha: float, gamma: int, cost_ops: float) -> float:
    """``(1 - alpha) (gamma cost_ops + gamma + 1) / (1 - alpha^(gamma+1))``: arithmetic
    operations a token, over plain decoding.

    ``cost_ops >= 0``: operations a token, drafter over target. Source: Leviathan et al.,
    arXiv 2211.17192, Theorem 3.11.
    """
    tau = expected_tau(alpha, gamma)
    return (gamma * _real("cost_ops", cost_ops) + gamma + 1) / tau


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
    alpha, cost = _real("alpha", alpha, 0, 1), _real("cost", cost)
    gamma_max = _count("gamma_max", gamma_max)
    cost_at = verify_cost if callable(verify_cost) else lambda n: 1.0
    if verify_cost is not None and not callable(verify_cost):
        curve = np.asarray(verify_cost, dtype=np.float64)
        if curve.ndim != 1 or len(curve) < 2:
            raise ValueError(f"verify_cost must be [n], n >= 2, got {curve.shape}")
        gamma_max, cost_at = min(gamma_max, len(curve) - 2), curve.__getitem__
    if abs(_positive("verify_cost at 1 row", cost_at(1)) - 1) > 1e-3:
        raise ValueError(f"verify_cost must be 1 at 1 row, got {cost_at(1)}")
    best = 0, 1.0
    for gamma in range(1, gamma_max + 1):
        rows = _positive(f"verify_cost at {gamma + 1} rows", cost_at(gamma + 1))
        gain = speedup(1.0, gamma * cost, rows, expected_tau(alpha, gamma))
        best = max(best, (gamma, gain), key=operator.itemgetter(1))
    return best


# --- rooflines ------------------------------------------------------------------------


@dataclass(frozen=True)
class Chip:
    """A device as two numbers: ``flops`` a second and memory ``bandwidth`` in bytes a
    second. Make your own from measurements, e.g. ``Chip("2 cores", 1e11, 2.8e10)``.
    """

    name: str
    flops: float
    bandwidth: float

    def __post_init__(self):
        _positive("flops", self.flops)
        _positive("bandwidth", self.bandwidth)

    @property
    def ridge(self) -> float:
        """FLOPs a byte above which the chip, not its memory, is the limit."""
        return self.flops / self.bandwidth


# Vendors' peak figures for one chip, bfloat16 dense (no sparsity) and HBM; no program
# reaches them. Google Cloud TPU pages; NVIDIA data sheets (SXM boards, A100 of 80 GB).
# JAX shows a TPU7x chip as two devices, one a TensorCore: half of these numbers each.
CHIPS = {
    "v5e": Chip("TPU v5e", 197e12, 819e9),
    "v5p": Chip("TPU v5p", 459e12, 2765e9),
    "v6e": Chip("TPU v6e", 918e12, 1638e9),
    "tpu7x": Chip("TPU7x", 2307e12, 7380e9),
    "a100": Chip("A100 SXM 80 GB", 312e12, 2039e9),
    "h100": Chip("H100 SXM", 989e12, 3350e9),
    "h200": Chip("H200 SXM", 989e12, 4800e9),
}


_SIZES = ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate")


@dataclass(frozen=True)
class ModelCost:
    """A dense decoder (Llama layout: gated MLP, two norms a layer, no biases) as sizes.

    Extra norms and biases of other families (below 0.1 %) are not counted; experts and
    latent attention are not covered, and a sliding window is counted as full attention.

    Attributes:
      hidden .. vocab: integers >= 1; ``heads`` is a multiple of ``kv_heads``.
      tied: one matrix for the embedding and the LM head?
      bytes_per_weight, bytes_per_cache: bytes of one weight and of one cached number.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = True
    bytes_per_weight: float = 2
    bytes_per_cache: float = 2

    def __post_init__(self):
        for name in (*_SIZES, "vocab"):
            _count(name, getattr(self, name), 1)
        if self.heads % self.kv_heads:
            groups = f"kv_heads = {self.kv_heads}, got {self.heads}"
            raise ValueError(f"heads must be a multiple of {groups}")
        _positive("bytes_per_weight", self.bytes_per_weight)
        _positive("bytes_per_cache", self.bytes_per_cache)

    @classmethod
    def from_config(
        cls, config: Any, *, bytes_per_weight: float = 2, bytes_per_cache: float = 2
    ) -> ModelCost:
        """From a config with ``vocab_size``, ``tie_embeddings`` and the names above."""
        return cls(
            **{name: getattr(config, name) for name in _SIZES},
            vocab=config.vocab_size,
            tied=config.tie_embeddings,
            bytes_per_weight=bytes_per_weight,
            bytes_per_cache=bytes_per_cache,
        )

    @property
    def matmul_weights(self) -> int:
        """Weights every row is multiplied with: the layers' matrices and the LM head,
        tied or not. The embedding is a lookup and not among them.
        """
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate
        return self.layers * layer + self.vocab * self.hidden

    @property
    def norm_weights(self) -> int:
        """Two norms a layer and the final one."""
        return (2 * self.layers + 1) * self.hidden

    @property
    def parameters(self) -> int:
        """All weights; a tied matrix counts once, an untied embedding on its own."""
        embedding = 0 if self.tied else self.vocab * self.hidden
        return self.matmul_weights + self.norm_weights + embedding

    @property
    def weight_bytes(self) -> float:
        """Memory of all ``parameters``."""
        return self.parameters * self.bytes_per_weight

    @property
    def kv_bytes_per_token(self) -> float:
        """Keys and values of one cached token, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_cache


def step_cost(
    model: ModelCost, *, rows: int, length: int, batch: int = 1
) -> tuple[float, float]:
    """FLOPs and bytes of scoring one block; a plain step is ``rows = 1``.

    FLOPs (two a multiply-add): matrix products, the LM head on every row, and attention
    of each row to ``length`` cached tokens and all ``rows`` of the block (masked pairs
    are computed). Lookups, norms, RoPE and softmax count nothing. Bytes: what must cross
    the memory bus once: the weights products and norms use (of the embedding only the
    looked-up rows, so that an untied table is not read), the cached keys and values, the
    block's own, the float32 logits. Activations are taken to stay on the chip.

    Args:
      model: the sizes.  rows: N >= 1, root included.
      length: committed tokens in the cache, a sequence.  batch: sequences, >= 1.
    """
    rows, batch = _count("rows", rows, 1), _count("batch", batch, 1)
    length, nodes = _count("length", length), rows * batch
    pairs = nodes * (length + rows)
    attention = 4 * model.layers * model.heads * model.head_dim * pairs
    weights = model.matmul_weights + model.norm_weights + nodes * model.hidden
    cache = (batch * length + nodes) * model.kv_bytes_per_token
    logits = 4 * nodes * model.vocab
    flops = 2 * nodes * model.matmul_weights + attention
    return flops, weights * model.bytes_per_weight + cache + logits


def arithmetic_intensity(flops: float, bytes_moved: float) -> float:
    """FLOPs a byte; below ``chip.ridge`` the step is bound by memory."""
    return _real("flops", flops) / _positive("bytes_moved", bytes_moved)


def roofline_seconds(flops: float, bytes_moved: float, chip: Chip) -> float:
    """``max(flops / chip.flops, bytes / chip.bandwidth)``: a lower bound on the time.

    Source: Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009.
    """
    compute = _real("flops", flops) / chip.flops
    return max(compute, _real("bytes_moved", bytes_moved) / chip.bandwidth)


def verify_curve(
    model: ModelCost, chip: Chip, rows: ArrayLike, *, length: int, batch: int = 1
) -> np.ndarray | float:
    """``T_verify(N) / T_decode`` on the roofline, for each N in ``rows`` (an int too).

    ``functools.partial(verify_curve, model, chip, length=512)`` is a ``verify_cost`` of
    ``optimal_gamma``.
    """

    def seconds(n: int) -> float:
        flops, moved = step_cost(model, rows=n, length=length, batch=batch)
        return roofline_seconds(flops, moved, chip)

    return np.vectorize(seconds, otypes=[float])(rows) / seconds(1)
