"""P-EAGLE: EAGLE-3 that drafts all tokens of a round in one pass.

Draft ``d + 1`` is read off a row whose token and feature nobody knows yet: the embedding of a
mask token and a learned feature stand for them. Such rows see the committed pairs and the
mask rows before them, never a draft, so that given the text the law of a chain is the
product of its rows'. What is committed is fed again with the target's true features, as in
EAGLE. Source: P-EAGLE as the speculators library has it (``speculators_model_type`` peagle).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import cast

import jax.numpy as jnp

from jspec.drafters import eagle, growth
from jspec.drafters.dflash import block, draw_rows
from jspec.drafters.eagle import Design, Weights
from jspec.drafters.recurrent import State, recurrent
from jspec.state import pending
from jspec.types import Array, Context, Drafter


@functools.cache
def drafter(
    design: Design, gamma: int = 4, *, dense: bool = True, dtype=jnp.float32
) -> Drafter:
    """Drafts chains; its params are ``eagle.Weights`` with ``mask_hidden``.

    Args:
      design: a head with a ``mask_id``.
      gamma: drafts a round.
      dense: draw from the drafter's law; if not, its best guesses as point masses.
      dtype: of the head's cache.

    Raises:
      ValueError: ``gamma < 1``, or a head without a mask token.
    """
    if design.mask_id is None:
        raise ValueError("the head names no mask token; draft with eagle.drafter")
    feeding = recurrent(eagle.net(design), growth.chain(gamma, dense), dtype=dtype)

    def propose(params: Weights, state: State, key: Array, context: Context):
        out = jnp.concatenate(
            [state.out[:, None], masked(design, params, state.cache, gamma - 1)], 1
        )
        sampling = context.sampling
        if not dense:
            cold = jnp.zeros_like(sampling.temperature)
            sampling = dataclasses.replace(sampling, temperature=cold)
        drafts = draw_rows(eagle.logits(design, params, out), key, sampling)
        # Without a feature, after a prompt of one token, there is nothing to go by.
        live = jnp.broadcast_to(state.cache.length[:, None] > 0, drafts.token.shape)
        return block(params.to_target, pending(context), drafts, live, dense), state

    return feeding._replace(propose=propose)


def masked(design: Design, params: Weights, cache, count: int) -> Array:
    """Outputs ``[B, count, M]`` of mask rows right after the pairs in the cache."""
    batch = cache.length.shape[0]
    if count == 0:
        return jnp.zeros((batch, 0, params.head.shape[-1]), params.embed.dtype)
    token = jnp.full((batch, count), cast(int, design.mask_id))
    hidden = design.read(design, params, params.mask_hidden)
    hidden = jnp.broadcast_to(hidden, (batch, count, hidden.shape[-1]))
    step = jnp.arange(count)
    mask = jnp.broadcast_to(step[:, None] >= step, (batch, count, count))
    depth = jnp.broadcast_to(step, (batch, count))
    return eagle.step(design, params, cache, token, hidden, mask, depth, None)[0]
