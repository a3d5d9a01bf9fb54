"""Sums over positions whose logits are never in memory all at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jspec.types import Array

ROWS = 256  # enough for products to run at full speed


def summed(terms: Callable[..., Any], *arrays: Array) -> Any:
    """``terms(*arrays)`` summed over parts of ``ROWS`` positions.

    The backward pass forms each part anew.

    Args:
      terms: of a part of every array, to a pytree of sums in which positions of zeros
        count nothing.
      *arrays: ``[n, ...]``, filled up with zeros.
    """
    rows = arrays[0].shape[0]
    size = min(ROWS, rows)
    parts = tuple(
        jnp.pad(a, [(0, -rows % size)] + [(0, 0)] * (a.ndim - 1)).reshape(
            -1, size, *a.shape[1:]
        )
        for a in arrays
    )

    @jax.checkpoint
    def add(total, part):
        return jax.tree.map(jnp.add, total, terms(*part)), None

    one = jax.eval_shape(terms, *(p[0] for p in parts))
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), one)
    return lax.scan(add, zero, parts)[0]
