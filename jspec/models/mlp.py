"""The gated MLP of a layer."""

from __future__ import annotations

import functools

import jax
from flax import struct

from jspec.models.linear import linear
from jspec.types import Array


@struct.dataclass
class Mlp:
    """Weights of a gated MLP: ``gate_up [2, I, M]``, ``down [M, I]``.

    ``gate_up_bias [2, I]`` and ``down_bias [M]``, or None.
    """

    gate_up: Array
    down: Array
    gate_up_bias: Array | None = None
    down_bias: Array | None = None


def gated(activation: str, weights: Mlp, x: Array) -> Array:
    """``down(act(gate(x)) * up(x))`` for ``x [..., M]``; a name of ``ACTIVATIONS``."""
    _, wide, _ = weights.gate_up.shape
    both = linear(x, weights.gate_up, weights.gate_up_bias)
    gate, up = both[..., :wide], both[..., wide:]
    return linear(ACTIVATIONS[activation](gate) * up, weights.down, weights.down_bias)


ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
