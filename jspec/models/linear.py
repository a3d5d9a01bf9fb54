"""Products with weights stored ``[out, in]``, whole or in blocks of rows."""

from __future__ import annotations

import itertools
import math

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jspec.types import Array

_LEAST_ROWS = 64  # smaller products are not worth a thread


@struct.dataclass
class Rows:
    """A weight cut into blocks of rows, whose products may run side by side.

    XLA:CPU computes one product with few columns on one core, but independent products
    on several: on two cores, two halves take half as long as the whole.

    Attributes:
      blocks: ``[rows, in]`` each.
      lead: static, the output axes of the whole weight, which is ``[*lead, in]``.
    """

    blocks: tuple[Array, ...]
    lead: tuple[int, ...] = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.lead, self.blocks[0].shape[-1])

    @property
    def dtype(self):
        return self.blocks[0].dtype

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        whole = np.concatenate([np.asarray(block) for block in self.blocks])
        return whole.reshape(self.shape).astype(dtype or whole.dtype, copy=False)


def bounds(rows: int, parts: int) -> list[tuple[int, int]]:
    """First and last row (exclusive) of at most ``parts`` even blocks."""
    parts = max(1, min(parts, rows // _LEAST_ROWS))
    edges = [rows * i // parts for i in range(parts + 1)]
    return list(itertools.pairwise(edges))


def linear(x: Array, w: Array | Rows, bias: Array | None = None) -> Array:
    """``x [..., I] @ w.T`` with ``w [*lead, I]``: ``[..., prod(lead)]``.

    Written as ``(w @ x.T).T``: with few rows this is the form that XLA:CPU turns into a
    matrix-vector product at full bandwidth on every supported JAX.
    """
    width = x.shape[-1]
    flat = x.reshape(-1, width)
    blocks = w.blocks if isinstance(w, Rows) else (w.reshape(-1, width),)
    parts = [lax.dot_general(b, flat, (((1,), (1,)), ((), ()))) for b in blocks]
    y = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
    y = y.T.reshape(*x.shape[:-1], math.prod(w.shape[:-1]))
    return y if bias is None else y + bias.reshape(-1)
