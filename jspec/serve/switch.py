"""Speculation that can be turned off: for one request, or for the whole batch."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jspec.decode import no_drafts
from jspec.state import Params, State
from jspec.types import Array, Context, Drafter, DraftShape, Feedback


@struct.dataclass
class Switch:
    """A drafter's state, and ``on [B]``: does the row want drafts?"""

    inner: Any
    on: Array


@functools.cache
def switched(drafter: Drafter) -> Drafter:
    """``drafter`` whose drafts are dropped in rows that are not ``on``."""

    def init(params, context: Context) -> Switch:
        on = jnp.ones(context.length.shape, bool)
        return Switch(drafter.init(params, context), on)

    def propose(params, state: Switch, key: Array, context: Context):
        block, inner = drafter.propose(params, state.inner, key, context)
        root = jnp.arange(block.live.shape[1]) == 0
        live = block.live & (root | state.on[:, None])
        block = dataclasses.replace(block, live=live)
        return block, dataclasses.replace(state, inner=inner)

    def update(params, state: Switch, feedback: Feedback) -> Switch:
        inner = drafter.update(params, state.inner, feedback)
        return dataclasses.replace(state, inner=inner)

    return Drafter(drafter.shape, init, propose, update)


def turned(one: State, on: bool) -> State:
    """A prefilled row whose request wants drafts, or does not."""
    draft = dataclasses.replace(one.draft, on=np.full(1, on))
    return dataclasses.replace(one, draft=draft)


@functools.cache
def paused(drafter: Drafter) -> Drafter:
    """A switched drafter that proposes nothing for now: rounds of plain decoding.

    One that taps the target's features is told of every token, since they would be gone
    later. Any other can be made anew from the tokens by ``resume``, and costs nothing
    meanwhile.
    """
    taps = drafter.shape.taps
    return Drafter(
        shape=DraftShape(nodes=1, depth=0, taps=taps),
        init=drafter.init,
        propose=no_drafts().propose,
        update=drafter.update if taps else lambda params, state, feedback: state,
    )


@functools.partial(jax.jit, static_argnames="drafter", donate_argnames="state")
def resume(params: Params, state: State, *, drafter: Drafter) -> State:
    """The state after a pause, ready for a switched drafter. ``state`` is donated."""
    if drafter.shape.taps:
        return state
    context = Context(state.tokens, state.length, state.sampling)
    fresh = drafter.init(params.draft, context)
    draft = dataclasses.replace(fresh, on=state.draft.on)
    return dataclasses.replace(state, draft=draft)
