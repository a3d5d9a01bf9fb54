"""Rooflines: what a step costs in FLOPs and bytes, and the time a chip needs at least.

Plain floats, no tracing. A value outside its range raises ``ValueError``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jspec import checks


@dataclass(frozen=True)
class Chip:
    """A device as two numbers: ``flops`` a second and memory ``bandwidth`` in bytes a
    second. Make your own from measurements, e.g. ``Chip("2 cores", 1e11, 2.8e10)``.
    ``memory`` in bytes is what it holds, infinite where that does not matter.
    """

    name: str
    flops: float
    bandwidth: float
    memory: float = float("inf")

    def __post_init__(self):
        checks.positive("flops", self.flops)
        checks.positive("bandwidth", self.bandwidth)

    @property
    def ridge(self) -> float:
        """FLOPs a byte above which the chip, not its memory, is the limit."""
        return self.flops / self.bandwidth


# Vendors' peak figures for one chip, bfloat16 dense (no sparsity), HBM and its size; no program
# reaches them. Google Cloud TPU pages; NVIDIA data sheets (SXM boards, A100 of 80 GB).
# JAX shows a TPU7x chip as two devices, one a TensorCore: half of these numbers each.
CHIPS = {
    "v5e": Chip("TPU v5e", 197e12, 819e9, 16e9),
    "v5p": Chip("TPU v5p", 459e12, 2765e9, 95e9),
    "v6e": Chip("TPU v6e", 918e12, 1638e9, 32e9),
    "tpu7x": Chip("TPU7x", 2307e12, 7380e9, 192e9),
    "a100": Chip("A100 SXM 80 GB", 312e12, 2039e9, 80e9),
    "h100": Chip("H100 SXM", 989e12, 3350e9, 80e9),
    "h200": Chip("H200 SXM", 989e12, 4800e9, 141e9),
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
            checks.count(name, getattr(self, name), 1)
        if self.heads % self.kv_heads:
            groups = f"kv_heads = {self.kv_heads}, got {self.heads}"
            raise ValueError(f"heads must be a multiple of {groups}")
        checks.positive("bytes_per_weight", self.bytes_per_weight)
        checks.positive("bytes_per_cache", self.bytes_per_cache)

    @classmethod
    def from_config(
        cls, config: Any, *, bytes_per_weight: float = 2, bytes_per_cache: float = 2
    ) -> ModelCost:
        """From a config with ``vocab_size``, ``tie_embeddings`` and the names above.

        Raises:
          ValueError: the config has experts or latent attention.
        """
        for name in ("experts", "latent"):
            if getattr(config, name, None) is not None:
                raise ValueError(
                    f"the config has {name} = {getattr(config, name)}; ModelCost covers "
                    "dense models with grouped-query attention"
                )
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
    rows, batch = checks.count("rows", rows, 1), checks.count("batch", batch, 1)
    length, nodes = checks.count("length", length), rows * batch
    pairs = nodes * (length + rows)
    attention = 4 * model.layers * model.heads * model.head_dim * pairs
    weights = model.matmul_weights + model.norm_weights + nodes * model.hidden
    cache = (batch * length + nodes) * model.kv_bytes_per_token
    logits = 4 * nodes * model.vocab
    flops = 2 * nodes * model.matmul_weights + attention
    return flops, weights * model.bytes_per_weight + cache + logits


def arithmetic_intensity(flops: float, bytes_moved: float) -> float:
    """FLOPs a byte; below ``chip.ridge`` the step is bound by memory."""
    return checks.real("flops", flops) / checks.positive("bytes_moved", bytes_moved)


def roofline_seconds(flops: float, bytes_moved: float, chip: Chip) -> float:
    """``max(flops / chip.flops, bytes / chip.bandwidth)``: a lower bound on the time.

    Source: Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009.
    """
    compute = checks.real("flops", flops) / chip.flops
    return max(compute, checks.real("bytes_moved", bytes_moved) / chip.bandwidth)


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
