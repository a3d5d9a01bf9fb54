"""Shorter drafts: cut to a size, to what was kept lately, or where the drafter is unsure.

The shapes of a round never change: nodes that are not wanted are dead. Each function takes
a draft and gives a draft.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from jspec import tree
from jspec.drafters.draft import Draft
from jspec.types import Array, Context, Drafter, DraftShape, Feedback


def truncate(draft: Draft, nodes: int) -> Draft:
    """Only the first ``nodes`` nodes of every block, the root included.

    Raises:
      ValueError: unless ``2 <= nodes <= N``.
    """
    most = draft.drafter.shape.nodes
    if not 2 <= nodes <= most:
        raise ValueError(
            f"{nodes} nodes of {draft.name}, whose blocks have {most}; take 2 to {most}"
        )
    return draft._replace(
        drafter=_truncated(draft.drafter, nodes), name=f"{draft.name}[:{nodes}]"
    )


@functools.cache
def _truncated(drafter: Drafter, nodes: int) -> Drafter:
    def propose(params, state, key, context: Context):
        block, state = drafter.propose(params, state, key, context)
        return block.first(nodes), state

    shape = drafter.shape
    shape = shape._replace(
        nodes=nodes,
        depth=min(shape.depth, nodes - 1),
        widths=tuple(w for w in shape.widths if w < nodes),
    )
    return drafter._replace(shape=shape, propose=propose)


class Length(NamedTuple):
    """How long drafts should be, learnt from what became of earlier ones.

    Attributes:
      start: float, before the first round.
      update: ``(value [B], n_accept [B], proposed [B]) -> value``, of rows that drafted.
      limit: ``value -> [B]`` most drafts on a path.
    """

    start: float
    update: Callable[[Array, Array, Array], Array]
    limit: Callable[[Array], Array]


@functools.cache
def heuristic(start: int = 5) -> Length:
    """Two more after a round that kept all, else one less, at least 1.

    Source: transformers, ``num_assistant_tokens_schedule="heuristic"``.
    """

    def update(value: Array, kept: Array, proposed: Array) -> Array:
        return jnp.where(kept == proposed, value + 2, jnp.maximum(value - 1, 1))

    return Length(float(start), update, lambda value: value)


@functools.cache
def moving_average(
    weight: float = 0.2, more: float = 1.0, start: float = 3.0
) -> Length:
    """As many as were kept on average, exponentially weighted, and ``more``.

    Raises:
      ValueError: unless ``0 < weight <= 1``.
    """
    if not 0 < weight <= 1:
        raise ValueError(f"weight is {weight}; it must be in (0, 1]")

    def update(value: Array, kept: Array, proposed: Array) -> Array:
        del proposed
        return value + weight * (kept - value)

    def limit(value: Array) -> Array:
        return jnp.maximum(jnp.round(value + more), 1)

    return Length(start, update, limit)


def adaptive(draft: Draft, length: Length) -> Draft:
    """Drafts only as deep as ``length`` says, row by row.

    The drafter still computes all its drafts; those too deep are dead, and a round whose
    live nodes are few costs less where its chain has ``widths``.
    """
    return draft._replace(
        drafter=_adaptive(draft.drafter, length), name=f"adaptive {draft.name}"
    )


@functools.cache
def _adaptive(drafter: Drafter, length: Length) -> Drafter:
    def init(params, context: Context):
        value = jnp.full(context.length.shape, length.start, jnp.float32)
        return drafter.init(params, context), value

    def propose(params, state, key, context: Context):
        inner, value = state
        block, inner = drafter.propose(params, inner, key, context)
        level = tree.depth(tree.ancestors(block.parent))
        live = block.live & (level <= length.limit(value)[:, None])
        return dataclasses.replace(block, live=live), (inner, value)

    def update(params, state, feedback: Feedback):
        inner, value = state
        block, kept = feedback.block, feedback.verdict.n_accept
        level = tree.depth(tree.ancestors(block.parent))
        proposed = jnp.max(jnp.where(block.live & block.vote, level, 0), -1)
        new = jnp.minimum(length.update(value, kept, proposed), drafter.shape.depth)
        counts = (kept >= 0) & (proposed > 0)
        return drafter.update(params, inner, feedback), jnp.where(counts, new, value)

    return Drafter(_narrow(drafter.shape), init, propose, update)


def confident(draft: Draft, least: float = 0.4) -> Draft:
    """Ends a sampled chain after the first draft whose law is unsure of its best token.

    Draft i + 1 lives if the largest entry of the law that draft i came from is at least
    ``least``: known before draft i + 1 is drawn, so the law of the text stays the target's.
    Source: transformers, ``assistant_confidence_threshold``.

    Raises:
      ValueError: the drafter is no chain with laws, or ``least`` is outside [0, 1].
    """
    shape = draft.drafter.shape
    if not shape.dense or shape.nodes != shape.depth + 1:
        raise ValueError(
            f"{draft.name} has no chain drawn from laws; confidence needs one"
        )
    if not 0 <= least <= 1:
        raise ValueError(f"least is {least}; a confidence is in [0, 1]")
    return draft._replace(
        drafter=_confident(draft.drafter, least), name=f"confident {draft.name}"
    )


@functools.cache
def _confident(drafter: Drafter, least: float) -> Drafter:
    def propose(params, state, key, context: Context):
        block, state = drafter.propose(params, state, key, context)
        assert block.law.q is not None
        sure = jnp.max(block.law.q, -1) >= least
        # Nodes 0 and 1 always live: the first draft is made whatever its law is like.
        sure = jnp.pad(sure[:, :-2], ((0, 0), (2, 0)), constant_values=True)
        live = block.live & jnp.cumprod(sure, -1, dtype=jnp.int32).astype(bool)
        return dataclasses.replace(block, live=live), state

    return drafter._replace(shape=_narrow(drafter.shape), propose=propose)


def _narrow(shape: DraftShape) -> DraftShape:
    """The shape with forwards for no draft and for short ones.

    Few, for each is a target forward more to compile.
    """
    widths = {*shape.widths, *(w for w in (1, 4) if w < shape.nodes)}
    return shape._replace(widths=tuple(sorted(widths)))
