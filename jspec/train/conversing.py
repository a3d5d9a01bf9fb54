"""Conversations written by a target, many at once, on the device.

Every sequence of the batch writes one conversation, and when it has ended begins the
next by rewinding its cache to the template's prefix. What is drawn is a function of the
seed, the number of the conversation and the place in it, so neither the size of the
batch nor the neighbours matter.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec import sampling as smp
from jspec.prefill import fill_cache
from jspec.sampling import Sampling
from jspec.train.template import Template
from jspec.types import Array, Target, chain


class Plan(NamedTuple):
    """What conversations are made of; static.

    Attributes:
      form: the chat template's fixed tokens.
      eos_ids: ids that end a turn.
      user_cap: most tokens of the user's words, the end not counted.
      answer_cap: most tokens of an answer, the end counted.
      user_top_p: the user's words are drawn at temperature 1 from this much mass.
      answer_top_k: answers are drawn from so many tokens.
      temperatures: of the answers; each conversation draws one of them.
    """

    form: Template
    eos_ids: tuple[int, ...]
    user_cap: int = 96
    answer_cap: int = 274
    user_top_p: float = 0.95
    answer_top_k: int = 64
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.6, 1.0)

    @property
    def width(self) -> int:
        """Most tokens of a conversation after the prefix."""
        return self.user_cap + len(self.form.turn) + self.answer_cap


@struct.dataclass
class Given:
    """User's words: conversation i takes row i modulo Q.

    ``tokens [Q, user_cap]`` int32, ``size [Q]`` int32. If they are ``open`` the target
    goes on from them until it ends the user's turn; else they are the whole turn.
    """

    tokens: Array
    size: Array
    open: bool = struct.field(pytree_node=False, default=False)


@struct.dataclass
class Writing:
    """A part of a corpus while it is written: C conversations, B of them at a time.

    Attributes:
      cache: the target's.
      pending: ``[B]`` int32, decided but not yet in the cache.
      row: ``[B]`` int32, which conversation of the part a sequence writes; C or more
        when there is none left for it.
      place: ``[B]`` int32, tokens of the conversation so far.
      user: ``[B]`` int32, the user's tokens with their end, or 0 until they have ended.
      next: int32, the first conversation that nobody has begun.
      tokens: ``[C, W]`` int32 conversations without prefix.
      users, sizes: ``[C]`` int32, lengths of the user's part and of the whole; 0 until
        the conversation has ended.
      finite: bool, all logits so far were finite.
    """

    cache: Any
    pending: Array
    row: Array
    place: Array
    user: Array
    next: Array
    tokens: Array
    users: Array
    sizes: Array
    finite: Array


def begin(
    params: Any, *, target: Target, plan: Plan, rows: int, part: int, dtype=jnp.float32
) -> Writing:
    """The start of a part of ``part`` conversations, ``rows`` of them at a time."""
    prefix = jnp.array([plan.form.prefix], jnp.int32)
    length = jnp.array([prefix.shape[1]], jnp.int32)
    return _begin(
        params,
        prefix,
        length,
        target=target,
        slots=prefix.shape[1] + plan.width + 1,  # a cache is written one row ahead
        rows=rows,
        shape=(part, plan.width),
        dtype=dtype,
    )


# The length is an argument: XLA would fold the masks of a constant one for minutes.
@functools.partial(
    jax.jit, static_argnames=("target", "slots", "rows", "shape", "dtype")
)
def _begin(params, prefix, length, *, target, slots, rows, shape, dtype) -> Writing:
    one, _ = fill_cache(target, params, prefix, length, slots=slots, dtype=dtype)
    part = shape[0]
    zeros = jnp.zeros(rows, jnp.int32)
    return Writing(
        cache=jax.tree.map(lambda x: jnp.repeat(x, rows, axis=0), one),
        pending=jnp.repeat(prefix[:, -1], rows),
        row=jnp.arange(rows, dtype=jnp.int32),
        place=zeros,
        user=zeros,
        next=jnp.int32(rows),
        tokens=jnp.zeros(shape, jnp.int32),
        users=jnp.zeros(part, jnp.int32),
        sizes=jnp.zeros(part, jnp.int32),
        finite=jnp.bool_(True),
    )


@functools.partial(jax.jit, static_argnames=("target", "plan"), donate_argnames="state")
def advance(
    params: Any,
    state: Writing,
    sampling: Sampling,
    given: Given | None,
    first: Array,
    count: Array,
    steps: Array,
    *,
    target: Target,
    plan: Plan,
) -> Writing:
    """Writes up to ``steps`` tokens in every sequence.

    Args:
      params, state: the target's weights; the part so far, which is given away.
      sampling: of B sequences, for what the plan does not say; its keys are all equal.
      given: user's words, or None to let the target write them.
      first: int32, number of the part's first conversation in the corpus.
      count: int32, conversations of this part, at most C.
      steps: int32.
      target, plan: static.
    """

    def busy(carry):
        step, state = carry
        return (step < steps) & jnp.any(state.row < count)

    def write(carry):
        step, state = carry
        return step + 1, _write_token(
            params, state, sampling, given, first, count, target=target, plan=plan
        )

    return lax.while_loop(busy, write, (jnp.int32(0), state))[1]


def _write_token(
    params, state: Writing, sampling: Sampling, given, first, count, *, target, plan
) -> Writing:
    """One more token in every sequence that has a conversation to write."""
    active = state.row < count
    out = target.score(params, state.cache, chain(state.pending[:, None]))
    root = jnp.zeros((len(active), 1), jnp.int32)
    cache = state.cache.append(out.kv, root, active.astype(jnp.int32))
    finite = jnp.isfinite(jnp.max(out.logits, -1))[:, 0]

    number = first + state.row
    drawn = _draw(out.logits, sampling, number, state, plan)
    user, in_user, user_ends = _user_token(drawn, given, number, state, plan)
    between = jnp.array((*plan.form.turn[1:], 0), jnp.int32)
    after = state.place - state.user  # place counted from the end of the user's part
    answer_at = after - (len(between) - 1)
    fixed = between[jnp.clip(after, 0, len(between) - 1)]
    last = answer_at == plan.answer_cap - 1
    answer = jnp.where(last, plan.eos_ids[0], drawn)
    token = jnp.where(in_user, user, jnp.where(answer_at < 0, fixed, answer))
    ends = active & ~in_user & (answer_at >= 0) & _is_eos(token, plan)

    place = state.place + active
    part = len(state.sizes)
    done = jnp.where(ends, state.row, part)  # rows beyond the part are dropped
    begun = state.next + jnp.cumsum(ends) - ends
    start = len(plan.form.prefix) - 1
    return Writing(
        cache=cache.rewind(jnp.where(ends, start, cache.length)),
        pending=jnp.where(ends, plan.form.prefix[-1], token),
        row=jnp.where(ends, begun, state.row).astype(jnp.int32),
        place=jnp.where(ends, 0, place).astype(jnp.int32),
        user=jnp.where(ends, 0, jnp.where(user_ends, place, state.user)),
        next=state.next + jnp.sum(ends, dtype=jnp.int32),
        tokens=state.tokens.at[state.row, state.place].set(token, mode="drop"),
        users=state.users.at[done].set(state.user, mode="drop"),
        sizes=state.sizes.at[done].set(place, mode="drop"),
        finite=state.finite & jnp.all(finite | ~active),
    )


def _draw(logits: Array, sampling: Sampling, number, state: Writing, plan: Plan):
    """A token ``[B]`` from each law, which depends on who speaks."""
    in_user = state.user == 0
    options = dataclasses.replace(
        sampling,
        temperature=jnp.where(in_user, 1.0, temperature(plan, sampling.key[0], number)),
        top_p=jnp.where(in_user, plan.user_top_p, 1.0),
        top_k=jnp.where(in_user, 0, plan.answer_top_k),
    )

    def uniform(key, number, place):
        _, k_token = _keys(key, number)
        return jax.random.uniform(jax.random.fold_in(k_token, place))

    u = jax.vmap(uniform)(sampling.key, number, state.place)
    return jax.vmap(smp.draw)(u, smp.draft_law(logits[:, 0], options))


def temperature(plan: Plan, key: Array, number: Array) -> Array:
    """The temperatures ``[B]`` of the answers in conversations ``number [B]``."""

    def pick(number):
        k_temperature, _ = _keys(key, number)
        return jax.random.choice(k_temperature, jnp.array(plan.temperatures))

    return jax.vmap(pick)(number).astype(jnp.float32)


def _keys(key: Array, number: Array) -> tuple[Array, Array]:
    """Keys of a conversation: for its temperature, and to be folded with the place."""
    k_temperature, k_token = jax.random.split(jax.random.fold_in(key, number))
    return k_temperature, k_token


def _user_token(drawn: Array, given: Given | None, number, state: Writing, plan: Plan):
    """``(token, in_user, ends)``: the user's next token, whether it is the user's turn,
    and whether it ends with this token."""
    in_user, end = state.user == 0, plan.form.turn[0]
    ended = (state.place == plan.user_cap) | _is_eos(drawn, plan)
    own = jnp.where(ended, end, drawn)
    if given is None:
        return own, in_user, in_user & (own == end)
    prompt = number % len(given.size)
    over = state.place >= given.size[prompt]
    at = jnp.minimum(state.place, given.tokens.shape[1] - 1)
    token = jnp.where(over, own if given.open else end, given.tokens[prompt, at])
    return token, in_user, in_user & over & (token == end)


def _is_eos(token: Array, plan: Plan) -> Array:
    return jnp.isin(token, jnp.array(plan.eos_ids, jnp.int32))
