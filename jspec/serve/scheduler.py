"""Which drafts of a batch are worth a row of the target: the hardware-aware scheduler.

R requests have G drafts each, and ``a[r, j]`` estimates that the first j drafts of request
r are all accepted. Verifying ``l_r`` drafts of every request emits
``tau = sum_r (1 + sum_{j <= l_r} a[r, j])`` tokens in the time of a step over
``B = sum_r (1 + l_r)`` rows. Policies choose ``l`` to make ``tau / seconds(B)`` large.

A schedule keeps the target's law only if it does not anticipate: whether draft j of a
request is verified may depend on the drafts before it and on other requests, but on
nothing computed from draft j itself, and so not on ``a[r, j + 1]``. All policies here
obey. Taking the best B of all with the current estimates does not, and is biased.

Source: DSpark, hardware-aware prefix scheduling (algorithm 1 and its deployed form).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jspec import checks
from jspec.drafters.draft import Draft
from jspec.models import Model
from jspec.serve import costs
from jspec.serve.costs import CostTable
from jspec.types import Array, Block, Context, Drafter, Feedback

# Rows a sequence that a batch is packed into: each is a program of its own to compile.
PACKS = (1.0, 1.5, 2.0, 3.0, 4.0)

# (survival [R, G], survival two rounds ago [R, G], active [R], table) -> lengths [R]
Policy = Callable[[Array, Array, Array, CostTable], Array]
# (state of the drafter, block) -> confidence [R, G]
Confidence = Callable[[Any, Block], Array]


def survival(confidence: Array) -> Array:
    """``a [R, G]`` from the chances ``[R, G]`` of each draft, given those before it.

    NaN counts as 0. The result never rises along a row, not even in its last bit, as a
    product taken in parallel may: a later draft must not outrank an earlier one.
    """
    chance = jnp.where(confidence > 0, jnp.minimum(confidence, 1.0), 0.0)
    return lax.cummin(jnp.cumprod(chance, axis=1), axis=1)


def early_stop(now: Array, stale: Array, active: Array, table: CostTable) -> Array:
    """Drafts in the order of their survival, up to the first that does not pay.

    Algorithm 1. Each draft is decided by drafts that rank before it and by itself, and a
    request's later drafts never rank before its earlier ones. Finds the optimum if
    throughput has one peak along the order.
    """
    del stale
    now = _of_active(now, active)
    order = _order(now)
    rate = _rates(now.T.ravel()[order], active, table)
    return _first(order, _climb(rate), now)


def stale_capacity(now: Array, stale: Array, active: Array, table: CostTable) -> Array:
    """As many drafts as were best two rounds ago; the best of now among them.

    The search runs over all numbers of rows, since real costs are a staircase; that looks
    ahead, which is why it must not see the present estimates.
    """
    return allocate(_of_active(now, active), capacity(stale, active, table))


def columns(now: Array, stale: Array, active: Array, table: CostTable) -> Array:
    """One length for all requests, grown while it pays.

    For forwards of fixed shape, whose cost is that of the longest request for everyone.
    Algorithm 1 with a whole column of drafts as its step.
    """
    del stale
    requests, gamma = now.shape
    gain = jnp.sum(_of_active(now, active), 0)
    tau = jnp.sum(active) + jnp.append(0.0, jnp.cumsum(gain))
    rate = tau / table.at(requests * (1.0 + jnp.arange(gamma + 1)))
    return jnp.where(active, _climb(rate), 0)


@functools.cache
def first(count: int) -> Policy:
    """The first ``count`` drafts of every request: what a schedule has to be better than.

    Raises:
      ValueError: ``count`` below 0.
    """
    checks.count("count", count, 0)

    def policy(now: Array, stale: Array, active: Array, table: CostTable) -> Array:
        del stale, table
        return jnp.where(active, min(count, now.shape[1]), 0)

    return policy


def capacity(survival: Array, active: Array, table: CostTable) -> Array:
    """The number of drafts of largest throughput, a scalar; the first if several tie."""
    best = -jnp.sort(-_of_active(survival, active).ravel())
    return jnp.argmax(_rates(best, active, table)).astype(jnp.int32)


def allocate(survival: Array, count: Array) -> Array:
    """Lengths ``[R]`` of the ``count`` drafts of largest survival.

    Ties go to the earlier position, then to the earlier request. Drafts with no chance
    are left out. Since rows never rise, what is chosen of a request is a prefix.
    """
    return _first(_order(survival), count, survival)


def _order(survival: Array) -> Array:
    """Draft numbers ``[R G]``, best first; they count requests, then positions."""
    return jnp.argsort(-survival.T.ravel(), stable=True)


def _first(order: Array, count: Array, survival: Array) -> Array:
    """How many of the first ``count`` drafts of ``order`` each request has, ``[R]``."""
    requests, gamma = survival.shape
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(order.size))
    taken = (rank.reshape(gamma, requests).T < count) & (survival > 0)
    return jnp.sum(taken, -1, dtype=jnp.int32)


def _rates(best: Array, active: Array, table: CostTable) -> Array:
    """Tokens a second with 0, 1 .. of the drafts ``best [R G]``: ``[R G + 1]``."""
    anchors = jnp.sum(active).astype(jnp.float32)
    drafts = jnp.arange(best.size + 1, dtype=jnp.float32)
    tau = anchors + jnp.append(0.0, jnp.cumsum(best))
    return tau / table.at(anchors + drafts)


def _climb(rate: Array) -> Array:
    """Steps from the first entry while each is better than the one before."""
    better = rate[1:] > rate[:-1]
    return jnp.sum(jnp.cumprod(better, dtype=jnp.int32), dtype=jnp.int32)


def _of_active(survival: Array, active: Array) -> Array:
    return jnp.where(active[:, None], survival, 0.0)


# --- confidences ----------------------------------------------------------------------


def temperatures(values: Sequence[float], gamma: int) -> Array:
    """Checks one temperature a draft position, ``[G]``.

    Raises:
      ValueError: their number is not ``gamma``, or one is not positive.
    """
    if np.ndim(values) != 1 or len(values) != gamma:
        raise ValueError(
            f"{np.shape(values)} temperatures for {gamma} draft positions; give a list "
            "with one for each, or fit them again for this gamma"
        )
    for place, value in enumerate(values, start=1):
        checks.positive(f"temperature of position {place}", value)
    return jnp.asarray(values, jnp.float32)


def calibrated(logits: Array, temperature: Array) -> Array:
    """Confidence ``[R, G]`` of a head's ``logits [R, G]``: ``sigmoid(logit / T_j)``.

    Source: sequential temperature scaling of DSpark, with temperatures already fitted.
    """
    return jax.nn.sigmoid(logits / temperature)


def sharpness(state: Any, block: Block) -> Array:
    """``sum q^2`` of the law that each draft is drawn from: ``[R, G]``.

    Needs no head and, being read off the law before the draw, anticipates nothing. It is
    the chance that a draw from a target just like q repeats the draft, which is what the
    coupled rule accepts.
    """
    del state
    q = cast(Array, block.law.q)
    return jnp.sum(jnp.square(q), -1)[:, :-1]


def of_head(state: Any, block: Block) -> Array:
    """What a DSpark drafter's confidence head says, calibrated as its folder has it."""
    del block
    return state.confidence


# --- a drafter under a schedule -------------------------------------------------------


class Params(NamedTuple):
    """What a scheduled drafter is called with."""

    inner: Any
    table: CostTable


@struct.dataclass
class State:
    """A drafter's state and what the scheduler remembers.

    Attributes:
      inner: the drafter's.
      past: ``[B, 2, G]`` survivals of the last two rounds, the older one first; 1 before
        there were any.
      active: ``[B]`` did the row take part in the last round?
    """

    inner: Any
    past: Array
    active: Array


@functools.cache
def scheduled(
    drafter: Drafter,
    confidence: Confidence,
    policy: Policy = early_stop,
    widths: tuple[int, ...] = (),
    packs: tuple[float, ...] = (),
) -> Drafter:
    """``drafter`` with its chains cut where the batch has no use for the rest.

    Shapes stay fixed: what is not scheduled is dead, and ``packs`` save its rows. Its
    params are ``Params``.

    Args:
      drafter: proposes chains.
      confidence: chance of each draft given those before it, decided before it is drawn;
        ``of_head``, ``sharpness``, or another.
      policy: of this module, or a function like them that anticipates nothing.
      widths, packs: block sizes, and rows a sequence, for which a program of its own is
        worth while; see ``DraftShape``.

    Raises:
      ValueError: the drafter grows trees, or has no law for ``sharpness`` to read.
    """
    shape = drafter.shape
    if shape.nodes != shape.depth + 1 or not shape.depth:
        raise ValueError(
            f"a schedule cuts chains, and this drafter proposes {shape.nodes} nodes of "
            f"depth {shape.depth}; choose a chain of drafts, e.g. by gamma"
        )
    if confidence is sharpness and not shape.dense:
        raise ValueError(
            "scheduling needs confidences, and the drafter has neither a confidence head "
            "nor a law to read them from; its tokens are point masses"
        )

    def init(params: Params, context: Context) -> State:
        inner = drafter.init(params.inner, context)
        batch = context.length.shape[0]
        past = jnp.ones((batch, 2, shape.depth), jnp.float32)
        return State(inner, past, jnp.ones(batch, bool))

    def propose(params: Params, state: State, key: Array, context: Context):
        block, inner = drafter.propose(params.inner, state.inner, key, context)
        chance = jnp.where(block.live[:, 1:], confidence(inner, block), 0.0)
        now = survival(chance)
        length = policy(now, state.past[:, 0], state.active, params.table)
        wanted = jnp.arange(shape.nodes) <= length[:, None]
        block = dataclasses.replace(block, live=block.live & wanted)
        past = jnp.stack([state.past[:, 1], now], 1)
        return block, dataclasses.replace(state, inner=inner, past=past)

    def update(params: Params, state: State, feedback: Feedback) -> State:
        inner = drafter.update(params.inner, state.inner, feedback)
        active = feedback.verdict.n_accept >= 0
        return dataclasses.replace(state, inner=inner, active=active)

    inside = tuple(w for w in sorted({*shape.widths, *widths}) if w < shape.nodes)
    shape = shape._replace(widths=inside, packs=packs)
    return Drafter(shape, init, propose, update)


def schedule(
    draft: Draft,
    table: CostTable,
    *,
    confidence: Confidence | None = None,
    policy: Policy = early_stop,
    widths: tuple[int, ...] = (),
    packs: tuple[float, ...] = (),
) -> Draft:
    """A drafter with its weights under a schedule; see ``scheduled``.

    ``confidence`` is that of the drafter's head if it has one, else ``sharpness``.
    """
    if confidence is None:
        headed = getattr(draft.params, "confidence", None) is not None
        confidence = of_head if headed else sharpness
    drafter = scheduled(draft.drafter, confidence, policy, widths, packs)
    name = f"{draft.name}, scheduled"
    return Draft(drafter, Params(draft.params, table), name, draft.vocab_size)


def schedule_here(
    draft: Draft,
    model: Model,
    batch: int,
    *,
    context: int = 64,
    packs: tuple[float, ...] = PACKS,
    **options: Any,
) -> Draft:
    """``schedule`` for batches of a size on this device, whose rounds are measured now.

    Args:
      draft: proposes chains.  model: the target.
      batch: sequences decoded together.  context: tokens in every cache, for the costs.
      packs: of ``schedule``.
      options: sampling options, for the costs.
    """
    nodes = draft.drafter.shape.nodes
    widths = sorted({1, 2, max(nodes // 2, 3)})
    found = costs.of_rounds(
        model, draft, batch=batch, widths=widths, context=context, **options
    )
    packs = tuple(p for p in packs if p < nodes)
    return schedule(draft, costs.table(found), packs=packs)
