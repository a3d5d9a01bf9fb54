"""Attention over latents: one vector a token, the key and the value of every head.

The same function as ``jspec.pallas.block_attention`` with one kv head whose keys are its
values, without a second copy of the cache: that function wants keys ``[D, S]`` and values
``[S, D]``, and XLA:CPU would write the transposed cache out in every step.
"""

from __future__ import annotations

import jax.numpy as jnp
from einops import rearrange

from jspec.pallas.reference import MASKED
from jspec.types import Array


def latent_attention(
    q: Array, stored: Array, length: Array, own: Array, mask: Array, *, scale: float
) -> Array:
    """Attention of a block over the cached latents and over its own, one softmax.

    Args:
      q: ``[B, N, H, R]`` in latent space, rotated.
      stored: ``[B, 1, S, R]``.  length: ``[B]`` int32, live cache slots.
      own: ``[B, X, 1, R]``, the block's latents, X >= N as in ``block_attention``.
      mask: ``[B, N, X]`` bool, true where row ``i`` sees node ``j``.
      scale: factor on ``q . latent``.

    Returns:
      ``[B, N, H, R]`` float32.
    """
    _, nodes, heads, _ = q.shape
    stored, own = stored[:, 0], own[:, :, 0]
    q = rearrange(q * scale, "b n h r -> b r (h n)")  # X = H * N rows
    seen = jnp.tile(mask.swapaxes(1, 2), (1, 1, heads))
    live = jnp.arange(stored.shape[1])[:, None] < length[:, None, None]

    def scores(c, visible):
        # The cache stands first: as the left factor it is read as it lies.
        s = jnp.einsum("bsr,brx->bsx", c, q, preferred_element_type=jnp.float32)
        return jnp.where(visible, s, MASKED)

    def mix(e, c):
        return jnp.einsum(
            "bsx,bsr->bxr", e.astype(c.dtype), c, preferred_element_type=jnp.float32
        )

    s_cache, s_block = scores(stored, live), scores(own, seen)
    top = jnp.maximum(s_cache.max(1, initial=MASKED), s_block.max(1))[:, None]
    e_cache, e_block = jnp.exp(s_cache - top), jnp.exp(s_block - top)
    total = e_cache.sum(1) + e_block.sum(1)
    out = (mix(e_cache, stored) + mix(e_block, own)) / total[..., None]
    return rearrange(out, "b (h n) r -> b n h r", n=nodes)
