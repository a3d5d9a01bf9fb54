"""Products with weights stored ``[out, in]``, and embeddings."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from jspec.pallas import platform
from jspec.types import Array

_FEW = 48  # rows from which on repacking the weight is worth it
_WHOLE = 8  # float32 columns that are one pass; fewer are padded to half or all of it
_MANY = 256  # rows from which on the result's order matters
_PRECISION = "jax_default_matmul_precision"


def linear(x: Array, w: Array, bias: Array | None = None) -> Array:
    """``x [..., I] @ w.T`` with ``w [*lead, I]``: ``[..., prod(lead)]``.

    A row of float32 is written as ``(w @ x.T).T``, the form that XLA:CPU turns into a
    matrix-vector product at full bandwidth on every supported JAX. For a few rows see
    ``_few``, for weights of two bytes ``_narrow``. With many rows those would leave a result
    in the wrong order for all that follows.
    """
    width = x.shape[-1]
    flat, whole = x.reshape(-1, width), w.reshape(-1, width)
    if whole.dtype.itemsize == 2:
        y = _narrow(flat, whole)
    elif flat.shape[0] >= _MANY:
        y = _many(flat, whole)
    elif 1 < flat.shape[0] < _FEW and platform() == "cpu":
        y = _few(flat, whole)
    else:
        y = _product(whole, flat, 1, 1).T.astype(x.dtype)
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
    count, narrow = x.shape[0], x.astype(w.dtype)
    if platform() != "cpu":
        return _product(narrow, w, 1, 1).astype(x.dtype)
    rows = jnp.pad(narrow, ((0, 1), (0, 0))) if count == 1 else narrow
    y = _few(rows, w) if count < _FEW else _product(rows, w, 1, 1)
    return y[:count].astype(x.dtype)


def _few(x: Array, w: Array) -> Array:
    """``x [n, I] @ w.T`` with ``w [O, I]`` and few rows on a CPU: ``[n, O]`` float32.

    The factor on the right of a product is repacked every time. XLA would put the weight
    there, whichever way the product is written; the barriers keep its order, weights on the
    left and a few columns to repack, and make the columns contiguous. That halves the time
    of a bfloat16 step. In float32 a product of 5 to 7 columns takes a fifth longer than one
    of 8 does, and one of 2 or 3 no less than one of 4.
    """
    count = x.shape[0]
    if w.dtype.itemsize == 4 and count < _WHOLE:
        x = jnp.pad(x, ((0, -count % (_WHOLE // 2)), (0, 0)))
    columns = lax.optimization_barrier(x.T.reshape(-1)).reshape(x.T.shape)
    return lax.optimization_barrier(_product(w, columns, 1, 0)).T[:count]


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
