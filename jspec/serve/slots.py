"""Slots on the device: prefill, insert, round, evict, resize, each a pure function.

A batch of slots is a ``jspec.state.State`` whose rows come and go. ``decode.prefill`` of
one prompt gives a State of one row, a value like any other: it may have been computed by
another process or on other devices. ``insert`` puts it into a slot, ``one_round`` decodes
all slots, ``evict`` ends some, ``resize`` moves the rows to a batch of another size.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec import decode
from jspec.options import Sampling
from jspec.state import STOP, Params, State
from jspec.types import Array, Drafter, Rule, Target

_TABLES = (
    ("bias_id", "bias_value"),
    ("forbidden",),
    ("forced_at", "forced_id"),
)
Axes = tuple[int, ...]  # of every leaf of a State the axis of the rows, -1 if shared
Shardings = tuple[Any, ...] | None  # of every leaf


class Look(NamedTuple):
    """What the host reads after a round.

    Attributes:
      tokens: ``[B, P]`` int32, of which ``count [B]`` are new.
      reason: ``[B]`` int32, RUNNING or why the row ended (``jspec.state``).
      proposed: ``[B]`` int32, drafts on the longest live path.
      log_prob: ``[B, P]`` float32, or None if the state holds none.
    """

    tokens: Array
    count: Array
    reason: Array
    proposed: Array
    log_prob: Array | None


def row_axes(one: Callable[[], State], two: Callable[[], State]) -> Axes:
    """Where the rows of every leaf are: the axis along which batches of 1 and 2 differ.

    Args:
      one, two: make a State of one and of two rows; they are only traced.
    """
    pairs = zip(*(jax.tree.leaves(jax.eval_shape(f)) for f in (one, two)), strict=True)
    return tuple(
        next((i for i in range(a.ndim) if a.shape[i] != b.shape[i]), -1)
        for a, b in pairs
    )


def _each(change: Callable, axes: Axes, *states: State) -> State:
    """``change(axis, *leaves)`` of every leaf with rows; the first state's of the rest."""

    def one(axis: int, leaf: Array, *others: Array) -> Array:
        if axis < 0:
            return leaf
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return change(axis, leaf, *others)
        raw = map(jax.random.key_data, (leaf, *others))
        return jax.random.wrap_key_data(change(axis, *raw))

    leaves = [jax.tree.leaves(s) for s in states]
    new = [one(*leaf) for leaf in zip(axes, *leaves, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(states[0]), new)


def pin(state: State, shardings: Shardings) -> State:
    """The state laid out over a mesh; nothing without one."""
    if shardings is None:
        return state
    leaves, tree = jax.tree.flatten(state)
    pinned = map(lax.with_sharding_constraint, leaves, shardings)
    return jax.tree.unflatten(tree, list(pinned))


def whole(arrays: Any, shardings: Shardings) -> Any:
    """Arrays copied to every device of the mesh, so that each process can read them."""
    if shardings is None:
        return arrays
    spec = jax.sharding.PartitionSpec()
    layout = jax.sharding.NamedSharding(shardings[0].mesh, spec)
    return jax.tree.map(lambda x: lax.with_sharding_constraint(x, layout), arrays)


@functools.partial(jax.jit, static_argnames=("axes", "size", "shardings"))
def spread(one: State, *, axes: Axes, size: int, shardings: Shardings = None) -> State:
    """A batch of ``size`` copies of a row."""
    return pin(_each(lambda axis, x: jnp.repeat(x, size, axis), axes, one), shardings)


@functools.partial(
    jax.jit, static_argnames=("axes", "shardings"), donate_argnames="state"
)
def insert(
    state: State, one: State, slot: Array, *, axes: Axes, shardings: Shardings = None
) -> State:
    """Puts a prefilled row into a slot (a traced scalar). ``state`` is donated."""

    def put(axis: int, x: Array, new: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(x, new, slot, axis)

    return pin(_each(put, axes, state, one), shardings)


@functools.partial(jax.jit, static_argnames="shardings", donate_argnames="state")
def evict(state: State, ended: Array, *, shardings: Shardings = None) -> State:
    """Ends the rows ``ended [B]``; their slots are free. ``state`` is donated."""
    reason = jnp.where(ended, STOP, state.reason).astype(jnp.int32)
    return pin(dataclasses.replace(state, reason=reason), shardings)


@functools.partial(jax.jit, static_argnames=("axes", "shardings"))
def resize(
    state: State, index: Array, keep: Array, *, axes: Axes, shardings: Shardings = None
) -> State:
    """Rows ``index [B']`` of the state; those not to ``keep [B']`` are ended."""
    taken = _each(lambda axis, x: jnp.take(x, index, axis=axis), axes, state)
    reason = jnp.where(keep, taken.reason, STOP).astype(jnp.int32)
    return pin(dataclasses.replace(taken, reason=reason), shardings)


@functools.partial(
    jax.jit,
    static_argnames=("target", "drafter", "rule", "shardings"),
    donate_argnames="state",
)
def one_round(
    params: Params,
    state: State,
    *,
    target: Target,
    drafter: Drafter,
    rule: Rule,
    shardings: Shardings = None,
) -> tuple[State, Look]:
    """``decode.decode_round`` of all slots, and what the host wants to see of it.

    ``state`` is donated, the look is not part of it: the host can read the look while
    the next round runs.
    """
    new, info = decode.decode_round(
        params, state, target=target, drafter=drafter, rule=rule
    )
    at = state.length[:, None] + jnp.arange(drafter.shape.depth + 1)
    at = jnp.minimum(at, state.tokens.shape[1] - 1)

    def fresh(x: Array) -> Array:
        return jnp.take_along_axis(x, at, axis=1)

    log_prob = None if new.log_prob is None else fresh(new.log_prob)
    look = Look(fresh(new.tokens), info.emitted, new.reason, info.proposed, log_prob)
    return pin(new, shardings), whole(look, shardings)


# --- sampling options of fixed width --------------------------------------------------


def fit_tables(sampling: Sampling, width: int) -> Sampling:
    """Options whose lists of ids have room for ``width``, so that all share programs.

    Raises:
      ValueError: a request has more biased, forbidden or forced tokens than that.
    """
    changed = {}
    for names in _TABLES:
        ids = np.asarray(getattr(sampling, names[0]))
        used = int((ids >= 0).sum(-1).max())
        if used > width:
            raise ValueError(
                f"{names[0]} lists {used} tokens, but the engine has room for {width}; "
                "send fewer, or start it with a larger table"
            )
        for name in names:
            array = np.asarray(getattr(sampling, name))[:, :width]
            fill = 0 if name == "bias_value" else -1
            pad = [(0, 0), (0, width - array.shape[1])]
            changed[name] = jnp.asarray(np.pad(array, pad, constant_values=fill))
    return dataclasses.replace(sampling, **changed)


def rows(chosen: Sequence[int], size: int) -> tuple[np.ndarray, np.ndarray]:
    """``index`` and ``keep`` of ``resize`` for the rows ``chosen``, in this order."""
    index = np.zeros(size, np.int32)
    index[: len(chosen)] = chosen
    return index, np.arange(size) < len(chosen)
