"""Logits that depend on the text: biases, penalties, forbidden and forced tokens.

The order is that of transformers' ``generate``. Whatever no sequence uses costs
nothing: it stands under a ``lax.cond`` on the options' values, so that turning it on
does not recompile either. Nothing is carried from round to round: counts are taken from
the tokens, and the drafts of a block are counted along each node's own path.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jspec.options import Sampling
from jspec.tree import depth
from jspec.types import Array, Block


def process(
    logits: Array,
    sampling: Sampling,
    tokens: Array,
    length: Array,
    start: Array,
    block: Block,
    mask: Array,
) -> Array:
    """Logits ``[B, N, V]`` after biases, penalties and constraints, float32.

    The history of a node is the committed text and its drafted ancestors, itself
    included; node 0 is the last committed token and is not counted twice. The token
    judged at a node of depth ``d`` is new token number ``length - start + d``, from 0.

    Args:
      logits: ``[B, N, V]`` raw logits of the block.
      sampling: the requests' options.
      tokens: ``[B, T]`` committed tokens, valid below ``length``.
      length: ``[B]`` committed tokens, the pending one included.
      start: ``[B]`` length of the prompt.
      block: the block that was scored.
      mask: ``[B, N, N]`` its ancestor-or-self mask.

    Source: ``_get_logits_processor`` of transformers for the order; presence and
    frequency penalties as in the OpenAI API, over new tokens only.
    """
    s = sampling
    new = (length - start)[:, None] + depth(mask)
    forced = _forced(s, new)
    count = partial(_count, tokens, length, block, mask, logits.shape[-1])
    penalised = (s.presence_penalty != 0) | (s.frequency_penalty != 0)
    early = new < s.min_new_tokens[:, None]
    edits = [
        (s.bias_id >= 0, lambda z: z + _scatter(s.bias_id, s.bias_value, z)),
        (
            s.repetition_penalty != 1,
            lambda z: _repetition(z, s, count(jnp.zeros_like(start))),
        ),
        (penalised, lambda z: _occurrence(z, s, count(start))),
        (s.forbidden >= 0, lambda z: z + _scatter(s.forbidden, -jnp.inf, z)),
        (early, lambda z: jnp.where(early[..., None] & _marked(s.eos, z), -jnp.inf, z)),
        (forced >= 0, lambda z: _force(z, forced)),
    ]
    active = [jnp.any(wanted) for wanted, _ in edits]

    def edit(z: Array) -> Array:
        for used, (_, change) in zip(active, edits, strict=True):
            z = lax.cond(used, change, _same, z)
        return z

    return lax.cond(jnp.any(jnp.stack(active)), edit, _same, logits.astype(jnp.float32))


def _same(z: Array) -> Array:
    return z


def _count(
    tokens: Array, length: Array, block: Block, mask: Array, vocab: int, start: Array
) -> Array:
    """Occurrences ``[B, N, V]`` of every id in ``tokens[start:length]`` and the path."""
    position = jnp.arange(tokens.shape[-1])
    inside = (position >= start[:, None]) & (position < length[:, None])
    path = mask.at[..., 0].set(False)

    def row(text, path):
        seen = jnp.zeros(vocab).at[text].add(1, mode="drop")
        return jax.vmap(lambda ids: seen.at[ids].add(1, mode="drop"))(path)

    return jax.vmap(row)(
        jnp.where(inside, tokens, vocab),
        jnp.where(path, block.token[:, None, :], vocab),
    )


def _repetition(z: Array, s: Sampling, count: Array) -> Array:
    """Divides positive and multiplies negative logits of ids in the text (CTRL, 4.1)."""
    penalty = s.repetition_penalty[:, None, None]
    return jnp.where(count > 0, jnp.where(z < 0, z * penalty, z / penalty), z)


def _occurrence(z: Array, s: Sampling, count: Array) -> Array:
    presence = s.presence_penalty[:, None, None] * (count > 0)
    return z - presence - s.frequency_penalty[:, None, None] * count


def _scatter(ids: Array, value: Array | float, z: Array) -> Array:
    """``[B, 1, V]`` with ``value`` at ``ids [B, J]`` (-1 = none) and 0 elsewhere."""
    vocab = z.shape[-1]
    ids = jnp.where(ids < 0, vocab, ids)
    value = jnp.broadcast_to(jnp.asarray(value, jnp.float32), ids.shape)
    row = jnp.zeros(vocab)
    return jax.vmap(lambda i, v: row.at[i].add(v, mode="drop"))(ids, value)[:, None]


def _marked(ids: Array, z: Array) -> Array:
    """``[V]`` bool, true at ``ids [E]`` (-1 = none)."""
    ids = jnp.where(ids < 0, z.shape[-1], ids)
    return jnp.zeros(z.shape[-1], bool).at[ids].set(True, mode="drop")


def _forced(s: Sampling, new: Array) -> Array:
    """The id ``[B, N]`` forced on each node's row, -1 = none. Positions are distinct."""
    hit = (s.forced_at[:, None] == new[..., None]) & (s.forced_at >= 0)[:, None]
    return jnp.max(jnp.where(hit, s.forced_id[:, None], -1), -1)


def _force(z: Array, forced: Array) -> Array:
    only = jnp.where(forced[..., None] == jnp.arange(z.shape[-1]), 0.0, -jnp.inf)
    return jnp.where(forced[..., None] >= 0, only, z)
