"""What a target makes of packed rows: its tapped features and last hidden states.

A row of documents is a block whose parents form one chain a document, scored on top of
an empty cache. The ancestor mask is then causal inside every document and nothing
else, a node's depth is its position, and whatever can score a block gives features:
there is no second forward to keep equal to the first.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspec.train.packing import Rows
from jspec.types import Array, Block, Target


class Features(NamedTuple):
    """Of every token of packed rows; zero on padding.

    Attributes:
      taps: ``[B, T, F]``, or None when no taps were asked for.
      hidden: ``[B, T, M]``, the last hidden states after the final norm: the head turns
        them into the target's logits.
    """

    taps: Array | None
    hidden: Array


@functools.partial(jax.jit, static_argnames=("target", "taps", "dtype"))
def extract(
    params: Any,
    tokens: Array,
    document: Array,
    position: Array,
    *,
    target: Target,
    taps: tuple[int, ...] = (),
    dtype=jnp.float32,
) -> Features:
    """Features of packed rows, by one forward without logits.

    Args:
      params: the target's weights.
      tokens, document, position: ``[B, T]``, see ``Rows``.
      target: its functions; any model with taps will do.
      taps: as in ``Target.score``.
      dtype: of keys and values, as of the cache in decoding.
    """
    batch, length = tokens.shape
    live = document >= 0
    block = Block(
        token=tokens,
        parent=jnp.where(position > 0, jnp.arange(length) - 1, -1),
        live=live,
        vote=jnp.ones_like(live),
    )
    cache = target.init_cache(batch, 1, dtype)
    out = target.score(params, cache, block, taps=(*taps, -1), rows="none")
    found = jnp.where(live[..., None], out.features, 0)
    tapped = found.shape[-1] // (len(taps) + 1) * len(taps)
    return Features(found[..., :tapped] if taps else None, found[..., tapped:])


def stream(
    params: Any,
    data: Callable[[int], Rows],
    *,
    target: Target,
    taps: tuple[int, ...] = (),
    dtype=jnp.float32,
) -> Callable[[int], Rows]:
    """``data`` with the target's features in every batch, computed when asked for.

    Other arguments as for ``extract``. Batches that are sharded already are computed
    where they are, if ``params`` are there too.
    """

    def step(number: int) -> Rows:
        rows = data(number)
        found = extract(
            params,
            rows.tokens,
            rows.document,
            rows.position,
            target=target,
            taps=taps,
            dtype=dtype,
        )
        return dataclasses.replace(rows, features=found.taps, hidden=found.hidden)

    return step
