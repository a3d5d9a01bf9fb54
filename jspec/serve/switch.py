"""Speculation that can be turned off: for one request, or for the whole batch."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jspec.cache import LatentCache
from jspec.decode import no_drafts
from jspec.state import Params, State
from jspec.types import Array, Context, Drafter, DraftShape, Feedback


@struct.dataclass
class Switch:
    """A drafter's state, and what it takes to make it anew.

    Attributes:
      inner: the state.
      on: ``[B]`` bool, does the row want drafts?
      features: those that the drafter taps, of all committed tokens but the pending one;
        None if it taps none.
    """

    inner: Any
    on: Array
    features: LatentCache | None


@functools.cache
def switched(drafter: Drafter) -> Drafter:
    """``drafter`` whose drafts are dropped in rows that are not ``on``."""

    def init(params, context: Context) -> Switch:
        on, features = jnp.ones(context.length.shape, bool), None
        if context.features is not None:
            latent = (context.features[:, None],)
            features = LatentCache(latent, context.length - 1)
        return Switch(drafter.init(params, context), on, features)

    def propose(params, state: Switch, key: Array, context: Context):
        block, inner = drafter.propose(params, state.inner, key, context)
        root = jnp.arange(block.live.shape[1]) == 0
        live = block.live & (root | state.on[:, None])
        block = dataclasses.replace(block, live=live)
        return block, dataclasses.replace(state, inner=inner)

    def update(params, state: Switch, feedback: Feedback) -> Switch:
        inner = drafter.update(params, state.inner, feedback)
        return dataclasses.replace(_noted(state, feedback), inner=inner)

    return Drafter(drafter.shape, init, propose, update)


def _noted(state: Switch, feedback: Feedback) -> Switch:
    """The state with the features of the tokens that were committed."""
    if state.features is None or feedback.features is None:
        return state
    kv, verdict = (feedback.features[:, :, None],), feedback.verdict
    features = state.features.append(kv, verdict.path, verdict.n_accept + 1)
    return dataclasses.replace(state, features=features)


def turned(one: State, on: bool) -> State:
    """A prefilled row whose request wants drafts, or does not."""
    draft = dataclasses.replace(one.draft, on=np.full(1, on))
    return dataclasses.replace(one, draft=draft)


@functools.cache
def paused(drafter: Drafter) -> Drafter:
    """A switched drafter that proposes nothing for now: rounds of plain decoding.

    Features that it taps are noted, since they would be gone later; the drafter itself
    rests, and is made anew by ``resume``.
    """
    return Drafter(
        shape=DraftShape(nodes=1, depth=0, taps=drafter.shape.taps),
        init=drafter.init,
        propose=no_drafts().propose,
        update=lambda params, state, feedback: _noted(state, feedback),
    )


@functools.partial(jax.jit, static_argnames="drafter", donate_argnames="state")
def resume(params: Params, state: State, *, drafter: Drafter) -> State:
    """The state after a pause, ready for a switched drafter. ``state`` is donated."""
    features, noted = None, state.draft.features
    if noted is not None:
        known = jnp.arange(noted.slots) < noted.length[:, None]
        features = jnp.where(known[..., None], noted.latent[0][:, 0], 0)
    context = Context(state.tokens, state.length, state.sampling, features)
    fresh = drafter.init(params.draft, context)
    draft = dataclasses.replace(state.draft, inner=fresh.inner)
    return dataclasses.replace(state, draft=draft)
