"""A separate, smaller language model as the drafter.

Leviathan et al. 2211.17192, Chen et al. 2302.01318: the drafter samples a chain from its
own law at the request's temperature; the block carries that law, so that the rule can
judge the ratio.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec import sampling as smp
from jspec.models import Model, target
from jspec.prefill import fill_cache
from jspec.state import pending
from jspec.types import (
    Array,
    Context,
    Drafter,
    DraftShape,
    Feedback,
    Law,
    Target,
    chain,
)


@struct.dataclass
class Drafting:
    """State: the model's cache, and the root and drafts ``[B, G + 1]`` of this round.

    Their rows are in the cache beyond its length. Between rounds there are none, -1.
    """

    cache: Any
    drafted: Array


@functools.cache
def small_model(
    model: Target, vocab_size: int, gamma: int = 4, chunk: int = 64, dtype=jnp.float32
) -> Drafter:
    """Drafts a chain with a language model of its own.

    Drafting appends the rows of its own guesses at their final slots; the update then
    keeps the accepted ones by setting the length, so nothing is computed twice. The last
    draft is fed too, though nothing is drawn from it: after full acceptance its row is
    needed, and without the head it is cheap. Committed tokens that somebody else drafted
    are read before the next draft.

    Args:
      model: the drafting model's functions; its weights are the drafter's params.
      vocab_size: the target's vocabulary. A draft vocabulary padded to another size is
        cut or filled up to it.
      gamma: tokens drafted a round.
      chunk: prompt tokens scored at once.
      dtype: of the drafter's cache.

    Raises:
      ValueError: if ``gamma < 1``.
    """
    if gamma < 1:
        raise ValueError(f"gamma is {gamma}; a drafter needs at least 1")

    def init(params, context: Context):
        slots = context.tokens.shape[1] + gamma + 1
        cache, _ = fill_cache(
            model,
            params,
            context.tokens,
            context.length,
            slots=slots,
            chunk=chunk,
            dtype=dtype,
        )
        return Drafting(
            cache, jnp.full((len(context.length), gamma + 1), -1, jnp.int32)
        )

    def propose(params, state: Drafting, key, context: Context):
        cache = _read(model, params, state.cache, context)
        token, start = pending(context), cache.length

        def step(carry, keys):
            cache, token = carry
            logits, cache = _feed(model, params, cache, token)
            logits = _fit(logits[:, 0], vocab_size)
            token, law = smp.draft(logits, keys, context.sampling)
            return (cache, token), (token, law)

        keys = jax.vmap(lambda k: jax.random.split(k, gamma), out_axes=1)(key)
        (cache, last), (drafts, laws) = lax.scan(step, (cache, token), keys)
        _, cache = _feed(model, params, cache, last, rows="none")
        tokens = jnp.concatenate([token[None], drafts]).swapaxes(0, 1)
        laws = jnp.pad(laws, ((0, 1), (0, 0), (0, 0)))
        block = chain(tokens, law=Law(q=laws.swapaxes(0, 1)))
        return block, Drafting(cache.rewind(start), tokens)

    def update(params, state: Drafting, feedback: Feedback):
        del params
        length = state.cache.length + _kept(state.drafted, feedback)
        none = jnp.full_like(state.drafted, -1)
        return Drafting(state.cache.rewind(length), none)

    shape = DraftShape(nodes=gamma + 1, depth=gamma, dense=True)
    return Drafter(shape, init, propose, update)


def first_layers(model: Model, count: int) -> Model:
    """The first ``count`` layers of a model under its own final norm and head.

    A small model that is always at hand, and a poor one: nothing has trained these
    layers to end in the head. It shares its arrays, but computes and caches apart from
    the model it is taken from.

    Raises:
      ValueError: unless ``1 <= count < layers``.
    """
    config = model.config
    if not 1 <= count < config.layers:
        raise ValueError(
            f"{count} layers of {model.name}, which has {config.layers}; take at least "
            f"1 and at most {config.layers - 1}"
        )
    params = dataclasses.replace(model.params, layers=model.params.layers[:count])
    name = f"{model.name}[:{count}]"
    return dataclasses.replace(
        model, name=name, target=target(config.first(count)), params=params
    )


def _read(model: Target, params, cache, context: Context):
    """The cache with the rows of all committed tokens but the pending one."""

    def behind(cache) -> Array:
        return cache.length < context.length - 1

    def step(cache):
        at = jnp.minimum(cache.length, context.tokens.shape[1] - 1)[:, None]
        token = jnp.take_along_axis(context.tokens, at, axis=1)[:, 0]
        return _feed(model, params, cache, token, "none", behind(cache))[1]

    return lax.while_loop(lambda cache: jnp.any(behind(cache)), step, cache)


def _kept(drafted: Array, feedback: Feedback) -> Array:
    """How many rows ``[B]`` of root and drafts are now rows of committed tokens."""
    path = feedback.verdict.path[:, : drafted.shape[1]]
    drafted = drafted[:, : path.shape[1]]
    token = jnp.take_along_axis(feedback.block.token, jnp.maximum(path, 0), axis=1)
    same = (path >= 0) & (token == drafted)
    return jnp.sum(jnp.cumprod(same, -1, dtype=jnp.int32), -1)


def _feed(model: Target, params, cache, token: Array, rows="all", count: Any = 1):
    """Feeds one token a sequence, or none: ``(logits [B, 1, V'], cache)``."""
    out = model.score(params, cache, chain(token[:, None]), rows=rows)
    root = jnp.zeros((token.shape[0], 1), jnp.int32)
    return out.logits, cache.append(out.kv, root, jnp.broadcast_to(count, token.shape))


def _fit(logits: Array, vocab_size: int) -> Array:
    """Draft logits over exactly the target's vocabulary; absent ids get no mass."""
    missing = vocab_size - logits.shape[-1]
    if missing <= 0:
        return logits[:, :vocab_size]
    return jnp.pad(logits, ((0, 0), (0, missing)), constant_values=-jnp.inf)
