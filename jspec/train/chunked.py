"""Functions of positions whose logits are never in memory all at once."""

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
    parts = _parts(arrays)

    @jax.checkpoint
    def add(total, part):
        return jax.tree.map(jnp.add, total, terms(*part)), None

    one = jax.eval_shape(terms, *(p[0] for p in parts))
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), one)
    return lax.scan(add, zero, parts)[0]


def mapped(terms: Callable[..., Any], *arrays: Array) -> Any:
    """``terms(*arrays)``, a pytree of ``[n, ...]``, in parts of ``ROWS`` positions.

    The backward pass forms each part anew.
    """
    rows = arrays[0].shape[0]
    found = lax.map(jax.checkpoint(lambda part: terms(*part)), _parts(arrays))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:rows], found)


def _parts(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """``[n, ...]`` as ``[parts, ROWS, ...]``, filled up with zeros."""
    rows = arrays[0].shape[0]
    size = min(ROWS, rows)
    return tuple(
        jnp.pad(a, [(0, -rows % size)] + [(0, 0)] * (a.ndim - 1)).reshape(
            -1, size, *a.shape[1:]
        )
        for a in arrays
    )
