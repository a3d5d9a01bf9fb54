"""The gated MLP, and the product that every layer is made of."""

from __future__ import annotations

import functools

import jax
from flax import struct
from jax import lax

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
    bias = None if weights.gate_up_bias is None else weights.gate_up_bias.reshape(-1)
    both = linear(x, weights.gate_up.reshape(2 * wide, -1), bias)
    gate, up = both[..., :wide], both[..., wide:]
    return linear(ACTIVATIONS[activation](gate) * up, weights.down, weights.down_bias)


ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


def linear(x: Array, w: Array, bias: Array | None = None) -> Array:
    """``x [..., I] @ w.T`` with ``w [O, I]``.

    Written as ``(w @ x.T).T``: with few rows this is the form that XLA:CPU turns into a
    matrix-vector product at full bandwidth on every supported JAX.
    """
    flat = x.reshape(-1, x.shape[-1])
    y = lax.dot_general(w, flat, (((1,), (1,)), ((), ()))).T
    y = y.reshape(*x.shape[:-1], w.shape[0])
    return y if bias is None else y + bias
