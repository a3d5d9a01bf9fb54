"""Block attention in plain ``jax.numpy``: the specification, and the XLA path."""

from __future__ import annotations

import jax.numpy as jnp
from einops import rearrange

from jspec import tree
from jspec.types import Array

# Finite, so that a row whose every key is masked stays finite too.
MASKED = -1e30


def block_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    length: Array,
    k_block: Array,
    v_block: Array,
    mask: Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Array:
    """See ``jspec.pallas.block_attention``."""
    batch, nodes, heads, _ = q.shape
    kv_heads, slots = k_cache.shape[1], k_cache.shape[-1]
    group = heads // kv_heads
    # Heads of a group and nodes are all rows of one product with the shared keys.
    q = rearrange(q * scale, "b n (k g) d -> b k (g n) d", k=kv_heads)
    k_block = rearrange(k_block, "b n k d -> b k d n")
    v_block = rearrange(v_block, "b n k d -> b k n d")

    def scores(k):
        s = jnp.einsum("bkrd,bkds->bkrs", q, k, preferred_element_type=jnp.float32)
        return s if softcap is None else softcap * jnp.tanh(s / softcap)

    slot = jnp.arange(slots)
    in_cache = slot < length[:, None, None]  # [B, 1, S], or [B, N, S] with a window
    in_block = mask  # [B, N, R]
    if window is not None:
        depth = tree.depth(mask)
        position = length[:, None] + depth
        in_cache &= position[..., None] - slot < window
        in_block &= depth[:, :, None] - depth[:, None, :] < window

    def rows(m):  # [B, 1 | N, X] -> [B, 1, 1 | G*N, X]
        m = m if m.shape[1] == 1 else jnp.tile(m, (1, group, 1))
        return m[:, None]

    s_cache = jnp.where(rows(in_cache), scores(k_cache), MASKED)
    s_block = jnp.where(rows(in_block), scores(k_block), MASKED)
    top = jnp.maximum(s_cache.max(-1, initial=MASKED), s_block.max(-1))[..., None]
    e_cache, e_block = jnp.exp(s_cache - top), jnp.exp(s_block - top)
    total = e_cache.sum(-1) + e_block.sum(-1)

    def mix(e, v):
        return jnp.einsum(
            "bkrs,bksd->bkrd",
            e.astype(v.dtype),
            v,
            preferred_element_type=jnp.float32,
        )

    out = (mix(e_cache, v_cache) + mix(e_block, v_block)) / total[..., None]
    return rearrange(out, "b k (g n) d -> b n (k g) d", n=nodes).astype(v_block.dtype)
