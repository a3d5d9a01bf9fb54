"""Self-speculation: the target's first layers draft, on the target's own cache.

LayerSkip (Elhoushi et al. 2404.16710): the first E layers under the model's final norm and
head. What they would store of a committed token is what the target has stored, so there is
no second cache, no second reading of the prompt, and nothing to keep in step. Guesses are
good only on a target that was trained to exit early. Unlike in the original, verification
computes the first E layers of a draft again: its block is scored whole.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jspec import sampling as smp
from jspec.drafters.draft import Draft
from jspec.drafters.small_model import first_layers
from jspec.models import Model
from jspec.state import pending
from jspec.types import Array, Context, Drafter, DraftShape, Law, Target, chain


def self_model(model: Model, layers: int, gamma: int = 4) -> Draft:
    """Drafts with the first ``layers`` layers of the target itself.

    Args:
      model: the target.  layers: E.
      gamma: tokens drafted a round.

    Raises:
      ValueError: unless ``1 <= layers < L`` and ``gamma >= 1``.
    """
    if gamma < 1:
        raise ValueError(f"gamma is {gamma}; a drafter needs at least 1")
    part = first_layers(model, layers)
    drafter = early_exit(part.target, layers, gamma)
    return Draft(drafter, part.params, part.name, model.config.vocab_size)


@functools.cache
def early_exit(part: Target, layers: int, gamma: int) -> Drafter:
    """The drafter of ``self_model``.

    The drafts of a round are scored as one growing chain, the later ones still dead: the
    cache is read and never written, so nothing of it is copied.

    Args:
      part: the target's functions, cut to ``layers`` layers.
      layers, gamma: as in ``self_model``.
    """

    def propose(params, state, key, context: Context):
        cache = context.cache.first(layers)
        token = pending(context)[:, None]
        token = jnp.pad(token, ((0, 0), (0, gamma)))
        keys = jax.vmap(lambda k: jax.random.split(k, gamma), out_axes=1)(key)

        def step(token: Array, given):
            i, keys = given
            grown = chain(
                token, jnp.broadcast_to(jnp.arange(gamma + 1) <= i, token.shape)
            )
            row = jnp.broadcast_to(i, token.shape[:1])
            out = part.score(params, cache, grown, rows=row)
            drawn, law = smp.draft(out.logits[:, 0], keys, context.sampling)
            return token.at[:, i + 1].set(drawn), law

        token, laws = lax.scan(step, token, (jnp.arange(gamma), keys))
        laws = jnp.pad(laws.swapaxes(0, 1), ((0, 0), (0, 1), (0, 0)))
        return chain(token, law=Law(q=laws)), state

    return Drafter(
        DraftShape(gamma + 1, gamma, dense=True),
        init=lambda params, context: (),
        propose=propose,
        update=lambda params, state, feedback: state,
    )
