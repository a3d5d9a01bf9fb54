"""What the rows of a diffusion block see of the context and of one another.

Layers with full attention see the whole context, and all rows of the block unless the
layer is causal. Sliding windows mean three different things in three implementations; a
checkpoint is run as the one that trained it. Each is a function

    (window, start [...], slot [S], rows) -> (context [..., rows, S], block [rows, rows])

of which keys the window leaves: those of the context by their positions ``slot``, and
those of the block, whose first row stands at ``start``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from einops import rearrange

from jspec.cache import KVCache
from jspec.pallas import block_attention
from jspec.types import Array

if TYPE_CHECKING:
    from jspec.drafters.diffusion import Attend, Design


def by_row(window: int, start: Array, slot: Array, rows: int) -> tuple[Array, Array]:
    """z-lab: every row has a window of its own, which also cuts the block, both ways."""
    context, _ = context_only(window, start, slot, rows)
    row = jnp.arange(rows)
    return context, jnp.abs(row[:, None] - row) < window


def context_only(
    window: int, start: Array, slot: Array, rows: int
) -> tuple[Array, Array]:
    """SpecForge: every row has a window of its own, and the block is whole."""
    position = start[..., None, None] + jnp.arange(rows)[:, None]
    return position - slot < window, jnp.ones((rows, rows), bool)


def by_anchor(window: int, start: Array, slot: Array, rows: int) -> tuple[Array, Array]:
    """speculators: all rows see the ``window`` tokens before the block, and all of it."""
    seen = start[..., None, None] - slot <= window
    seen = jnp.broadcast_to(seen, (*start.shape, rows, slot.shape[0]))
    return seen, jnp.ones((rows, rows), bool)


def block_mask(design: Design, layer: int, rows: int) -> Array:
    """``[rows, rows]`` which rows of a block layer ``layer`` lets see which."""
    every = jnp.ones((rows, rows), bool)
    return jnp.tril(every) if design.causal[layer] else every


def decoding(design: Design, cache: KVCache, rows: int) -> Attend:
    """Attention over the context in ``cache`` and over the block itself."""
    config, start = design.config, cache.length
    batch, slot = start.shape[0], jnp.arange(cache.slots)

    def attend(i: int, q: Array, k: Array, v: Array) -> Array:
        keys, values, window = cache.k[i], cache.v[i], config.windows[i]
        k, v = k.astype(keys.dtype), v.astype(values.dtype)
        own = block_mask(design, i, rows)
        if window is None:
            mask = jnp.broadcast_to(own, (batch, rows, rows))
            length = start
        else:
            # No kernel's window is any of these three: the context joins the block, and
            # one mask says it all.
            seen, near = design.reach(window, start, slot, rows)
            seen &= slot < start[:, None, None]
            mask = jnp.broadcast_to(own & near, (batch, rows, rows))
            mask = jnp.concatenate([seen, mask], -1)
            k = jnp.concatenate([rearrange(keys, "b k d s -> b s k d"), k], 1)
            v = jnp.concatenate([rearrange(values, "b k s d -> b s k d"), v], 1)
            keys, values = keys[..., :1], values[:, :, :1]
            length = jnp.zeros_like(start)
        return block_attention(
            q,
            keys,
            values,
            length,
            k,
            v,
            mask,
            scale=config.query_scale,
            softcap=config.attn_softcap,
        )

    return attend
