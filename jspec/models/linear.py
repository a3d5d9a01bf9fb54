"""Products with weights stored ``[out, in]``, whole or in blocks of rows; embeddings."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jspec.pallas import platform
from jspec.types import Array

_LEAST_ROWS = 64  # smaller products are not worth a thread
_FEW = 32  # columns of a product that keeps more than one core busy by itself
_MANY = 256  # columns of a product that keeps all cores busy by itself
_PRECISION = "jax_default_matmul_precision"
_ALIGNED = 16  # rows of float32 whose memory begins at a multiple of 64 bytes


@struct.dataclass
class Rows:
    """A weight, and the same memory as blocks of rows whose products run side by side.

    XLA:CPU computes a product with a few columns on one core, but independent products
    on several: on two cores, two halves take half as long as the whole. With one column
    it is the whole that is faster, and with many.

    Attributes:
      whole: ``[*lead, in]``.
      blocks: ``[rows, in]`` each, views of ``whole``.
    """

    whole: Array
    blocks: tuple[Array, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.whole.shape

    @property
    def dtype(self):
        return self.whole.dtype

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.asarray(self.whole, dtype)


def in_rows(host: np.ndarray, parts: int) -> Array | Rows:
    """A weight ``[*lead, in]`` on the device, in ``parts`` blocks if it is large enough.

    ``host`` is aligned memory that a CPU device adopts, as a whole and block by block.
    """
    flat = host.reshape(-1, host.shape[-1])
    cuts = bounds(flat.shape[0], parts)
    if len(cuts) == 1:
        return jax.device_put(host)
    blocks = [jax.device_put(flat[a:b]) for a, b in cuts]
    return Rows(jax.device_put(host), tuple(blocks))


def wholes(params: Any) -> list[Array]:
    """The arrays of a model, those in blocks once."""
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Rows))
    return [x.whole if isinstance(x, Rows) else x for x in leaves]


def bounds(rows: int, parts: int) -> list[tuple[int, int]]:
    """First and last row (exclusive) of at most ``parts`` even blocks.

    Blocks begin at multiples of 16 rows, so that they are aligned in memory.
    """
    parts = max(1, min(parts, rows // _LEAST_ROWS))
    edges = [rows * i // parts // _ALIGNED * _ALIGNED for i in range(parts)] + [rows]
    return list(itertools.pairwise(edges))


def linear(x: Array, w: Array | Rows, bias: Array | None = None) -> Array:
    """``x [..., I] @ w.T`` with ``w [*lead, I]``: ``[..., prod(lead)]``.

    With few rows ``x`` it is written as ``(w @ x.T).T``, the form that XLA:CPU turns into a
    matrix-vector product at full bandwidth on every supported JAX. With many rows that
    would leave a result in the wrong order for all that follows. For weights of two bytes
    see ``_narrow``.
    """
    width = x.shape[-1]
    flat = x.reshape(-1, width)
    whole = (w.whole if isinstance(w, Rows) else w).reshape(-1, width)
    if whole.dtype.itemsize == 2:
        y = _narrow(flat, whole)
    elif flat.shape[0] >= _MANY:
        y = _many(flat, whole)
    else:
        blocks = (whole,)
        if isinstance(w, Rows) and 1 < flat.shape[0] < _FEW:
            blocks = w.blocks
        parts = [lax.dot_general(b, flat, (((1,), (1,)), ((), ()))) for b in blocks]
        y = (parts[0] if len(parts) == 1 else jnp.concatenate(parts)).T
    y = y.reshape(*x.shape[:-1], math.prod(w.shape[:-1]))
    return y if bias is None else y + bias.reshape(-1)


def looked_up(table: Array, token: Array, dtype) -> Array:
    """Rows ``[..., M]`` of an embedding ``[V, M]`` in ``dtype``.

    XLA:CPU gathers no narrow floats, and would first make a float32 copy of the table; it
    does gather integers.
    """
    if table.dtype.itemsize != 2 or platform() != "cpu":
        return table[token].astype(dtype)
    # The barrier keeps a loop from casting the whole table, which is a copy, ahead of it.
    table, token = lax.optimization_barrier((table, token))
    bits = lax.bitcast_convert_type(table, jnp.uint16)[token]
    return lax.bitcast_convert_type(bits, table.dtype).astype(dtype)


def _narrow(x: Array, w: Array) -> Array:
    """``x [n, I] @ w.T`` with ``w [O, I]`` of two bytes, sums in float32: ``[n, O]``.

    XLA:CPU has a fast program for two rows and more. For one, or with narrow sums, it makes
    a float32 copy of the weight first, which takes five times as long as the product.
    """
    count = x.shape[0]
    rows = jnp.pad(x, ((0, 1), (0, 0))) if count == 1 and platform() == "cpu" else x
    return _product(rows.astype(w.dtype), w, 1, 1)[:count].astype(x.dtype)


def _many(x: Array, w: Array) -> Array:
    """``x [n, I] @ w.T`` with ``w [O, I]``: ``[n, O]``.

    TPUs and GPUs honour ``jax.default_matmul_precision("bfloat16")``; XLA:CPU leaves the
    operands as they are, so that here they are rounded by hand.
    """
    if getattr(jax.config, _PRECISION) == "bfloat16":
        return _in_bfloat16(x, w).astype(x.dtype)
    return _product(x, w, 1, 1).astype(x.dtype)


def _product(a: Array, b: Array, i: int, j: int) -> Array:
    """Sums over axes ``i`` and ``j``, in float32: a bfloat16 sum is slower on a CPU."""
    return lax.dot_general(
        a, b, (((i,), (j,)), ((), ())), preferred_element_type=jnp.float32
    )


@jax.custom_vjp
def _in_bfloat16(x: Array, w: Array) -> Array:
    return _product(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), 1, 1)


def _forward(x: Array, w: Array):
    return _in_bfloat16(x, w), (x, w)


def _backward(saved: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, w = saved
    dx = _product(g.astype(jnp.bfloat16), w.astype(jnp.bfloat16), 1, 0)
    # XLA:CPU transposes both operands of this one, which costs what bfloat16 would save.
    dw = _product(g, x.astype(g.dtype), 0, 0)
    return dx.astype(x.dtype), dw.astype(w.dtype)


_in_bfloat16.defvjp(_forward, _backward)
