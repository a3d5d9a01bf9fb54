"""Two drafters in one. A combination of drafts is a draft, so they nest.

What is verified changes from round to round, the shapes never do: a block has room for the
longest draft, and the nodes that are not wanted are dead.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jspec.drafters.draft import Draft
from jspec.types import (
    POINT_MASS,
    Array,
    Block,
    Context,
    Drafter,
    DraftShape,
    Feedback,
)

# (state of the first drafter, its block) -> [B] bool: is it good enough?
Prefer = Callable[[Any, Block], Array]


def fallback(first: Draft, second: Draft) -> Draft:
    """``first`` where it drafts anything at all, else ``second``, row by row."""
    return either(first, second, _drafted)


def by_score(first: Draft, second: Draft, least: float | None = None) -> Draft:
    """``first`` where it expects to keep at least ``least`` drafts, else ``second``.

    Args:
      first: a drafter whose state has a ``score [B]``, such as ``suffix``.
      second: any.
      least: the depth of ``second``'s blocks unless given, as in ArcticInference.
    """
    least = second.drafter.shape.depth if least is None else least
    return either(first, second, _scored(least))


def _drafted(state, block: Block) -> Array:
    del state
    return jnp.any(block.live[:, 1:], -1)


@functools.cache
def _scored(least: float) -> Prefer:
    return lambda state, block: state.score >= least


def either(first: Draft, second: Draft, prefer: Prefer) -> Draft:
    """In every row the block of ``first`` if it is preferred, else that of ``second``.

    ``second`` is not asked in a round in which no row needs it. The law ``q`` of drawn
    drafts is forgotten: exact all the same, but a drafter that samples keeps more alone.

    Args:
      first, second: drafters for one target; each gets the features of its own taps.
      prefer: see ``Prefer``.

    Raises:
      ValueError: they were made for targets of different vocabularies.
    """
    sizes = {d.vocab_size for d in (first, second)} - {None}
    if len(sizes) > 1:
        raise ValueError(
            f"{first.name} drafts for a vocabulary of {first.vocab_size}, {second.name} "
            f"for one of {second.vocab_size}; combine drafters of one target"
        )
    return Draft(
        _either(first.drafter, second.drafter, prefer),
        (first.params, second.params),
        f"{first.name}, else {second.name}",
        next(iter(sizes), None),
    )


@functools.cache
def _either(a: Drafter, b: Drafter, prefer: Prefer) -> Drafter:
    nodes = max(a.shape.nodes, b.shape.nodes)
    taps = a.shape.taps + b.shape.taps

    def init(params, context: Context):
        one, two = _shares(context, a, b)
        return a.init(params[0], one), b.init(params[1], two)

    def propose(params, state, key, context: Context):
        keys = jax.vmap(jax.random.split, out_axes=1)(key)
        block, first = a.propose(params[0], state[0], keys[0], context)
        use = prefer(first, block)

        def ask(second):
            other, second = b.propose(params[1], second, keys[1], context)
            return _fit(other, nodes), second

        def spare(second):
            return _fit(block, nodes), second

        other, second = lax.cond(jnp.all(use), spare, ask, state[1])
        chosen = jax.tree.map(
            lambda x, y: jnp.where(use[:, None], x, y), _fit(block, nodes), other
        )
        return chosen, (first, second)

    def update(params, state, feedback: Feedback):
        one, two = _shares(feedback, a, b)
        first = a.update(params[0], state[0], one)
        return first, b.update(params[1], state[1], two)

    widths = {*a.shape.widths, *b.shape.widths, a.shape.nodes, b.shape.nodes}
    shape = DraftShape(
        nodes,
        max(a.shape.depth, b.shape.depth),
        taps,
        widths=tuple(sorted(w for w in widths if w < nodes)),
    )
    return Drafter(shape, init, propose, update)


def _shares(seen: Any, a: Drafter, b: Drafter) -> tuple[Any, Any]:
    """A context or feedback for each of two drafters, with the features of its own taps."""
    one, two = len(a.shape.taps), len(b.shape.taps)

    def share(taps: int, part: Callable[[Array, int], Array]) -> Any:
        features = None
        if taps and seen.features is not None:
            features = part(
                seen.features, seen.features.shape[-1] * taps // (one + two)
            )
        return dataclasses.replace(seen, features=features)

    return share(one, lambda x, n: x[..., :n]), share(two, lambda x, n: x[..., -n:])


def _fit(block: Block, nodes: int) -> Block:
    """The block with dead nodes up to ``nodes``, its tokens taken as point masses."""
    more = nodes - block.token.shape[1]

    def pad(x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, more)))

    block = dataclasses.replace(block, law=POINT_MASS)
    return jax.tree.map(pad, block)
