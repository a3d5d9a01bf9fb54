"""DFlash-2's convolution inside a block, around attention and around the MLP.

Every row of a block is mixed with the rows just before it, with factors that the row's own
input chooses, one for each group of channels. The context takes no part.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from flax import struct

from jspec.models.linear import linear
from jspec.types import Array


@struct.dataclass
class Conv:
    """Weights of one convolution; side 0 stands before the sublayer, side 1 after it.

    Attributes:
      base: ``[2, taps, M]``, side, rows back, channel.
      kernel: ``[2 taps M / group, M]``, what a row's input adds to ``base``.
    """

    base: Array
    kernel: Array


@struct.dataclass
class Convs:
    """The two convolutions of a layer."""

    attention: Conv
    mlp: Conv


def around(conv: Conv | None, u: Array, sublayer: Callable[[Array], Array]) -> Array:
    """``sublayer(u)`` between the two sides of a convolution, if there is one.

    Both sides take their factors from ``u [B, n, M]``, the normalised input. Source:
    DFlash-2, the dynamic convolution.
    """
    if conv is None:
        return sublayer(u)
    _, taps, width = conv.base.shape
    chosen = linear(u, conv.kernel).reshape(*u.shape[:-1], 2, taps, -1)
    factor = conv.base + jnp.repeat(chosen, width // chosen.shape[-1], axis=-1)
    return _mix(factor[..., 1, :, :], sublayer(_mix(factor[..., 0, :, :], u)))


def _mix(factor: Array, x: Array) -> Array:
    """``sum_s factor[t, s] x[t - s]`` over rows ``[B, n, M]``, zero before the first."""
    rows = x.shape[1]
    out = jnp.zeros_like(x)
    for s in range(factor.shape[-2]):
        back = jnp.pad(x, ((0, 0), (s, 0), (0, 0)))[:, :rows]
        out += factor[..., s, :].astype(x.dtype) * back
    return out


def init(width: int, taps: int = 2, group: int = 16) -> Conv:
    """A convolution that changes nothing yet."""
    base = jnp.zeros((2, taps, width)).at[:, 0].set(1)
    return Conv(base, jnp.zeros((2 * taps * (width // group), width)))
