"""Labels of a drafter that knows only some of the target's ids."""

from __future__ import annotations

import jax.numpy as jnp

from jspec.types import Array


def draft_rows(
    tokens: Array, to_target: Array | None, rows: int
) -> tuple[Array, Array]:
    """Rows of a draft vocabulary that stand for ``tokens``, and whether there is one.

    Args:
      tokens: target ids, any shape.
      to_target: ``[rows]`` the target's id of every row, or None where they are the first.
      rows: of the vocabulary.
    """
    if to_target is None:
        return jnp.minimum(tokens, rows - 1), tokens < rows
    order = jnp.argsort(to_target)
    ascending = to_target[order]
    at = jnp.minimum(jnp.searchsorted(ascending, tokens), rows - 1)
    return order[at], ascending[at] == tokens
