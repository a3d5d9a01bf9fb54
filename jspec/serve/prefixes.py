"""Prompts that begin alike: what was scored of one is the start of the next.

A prompt leaves its cache and the features that the drafter taps. Keys and values of a
position depend on the tokens up to it alone, so another prompt starts from as many of
them as the two have in common, and scores the rest. The drafter's state is made anew
from all tokens and features: it may hold anything, and costs little.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec import decode
from jspec.prefill import Filled, fill_cache
from jspec.serve.slots import Shardings, pin, whole
from jspec.state import Params, State
from jspec.types import Array, Drafter, Target


class Entry(NamedTuple):
    """A prompt ``[n]`` and what it left, for one row."""

    prompt: np.ndarray
    filled: Filled


Known = tuple[Entry, ...]  # the latest used first


def longest(known: Known, prompt: Sequence[int]) -> tuple[int, Entry | None]:
    """Of which entry most tokens can be used, and how many.

    The last tokens of both prompts are pending, which nothing is known of.
    """
    ids, found = np.asarray(prompt), (0, None)
    for entry in known:
        n = min(len(ids), len(entry.prompt)) - 1
        differ = np.flatnonzero(ids[:n] != entry.prompt[:n])
        shared = int(differ[0]) if differ.size else n
        if shared > found[0]:
            found = shared, entry
    return found


def remember(known: Known, new: Entry, used: Entry | None, most: int) -> Known:
    """The entries with a new one in front, then the one it was made from.

    An entry that the new one contains is dropped, then those that were used longest ago.

    Args:
      known: before.  new: what the latest prompt left.  used: where it started from.
      most: entries to keep.
    """
    first = () if used is None or used is new or _within(used, new) else (used,)
    rest = tuple(e for e in known if e is not used and not _within(e, new))
    return ((new,) + first + rest)[:most]


def _within(old: Entry, new: Entry) -> bool:
    n = len(old.prompt) - 1
    return n < len(new.prompt) and np.array_equal(old.prompt[:n], new.prompt[:n])


@functools.partial(
    jax.jit,
    static_argnames=(
        "target",
        "drafter",
        "slots",
        "chunk",
        "log_prob",
        "dtype",
        "shardings",
    ),
)
def prefill(
    params: Params,
    sampling,
    tokens: Array,
    length: Array,
    limit: Array,
    begun: Filled,
    shared: Array,
    *,
    target: Target,
    drafter: Drafter,
    slots: int,
    chunk: int,
    log_prob: bool,
    dtype,
    shardings: Shardings = None,
) -> tuple[State, Array | None]:
    """``decode.prefill`` of one prompt that begins like another one.

    Args:
      begun: what that one left.
      shared: tokens they have in common, a scalar; fewer than either has.

    Returns:
      ``(state, features)``; with the state's cache they are what this prompt leaves.
    """
    cache = begun.cache.rewind(jnp.full_like(begun.cache.length, shared))
    filled = fill_cache(
        target,
        params.target,
        tokens,
        length,
        slots=slots,
        chunk=chunk,
        taps=drafter.shape.taps,
        dtype=dtype,
        begun=Filled(cache, begun.features),
    )
    given = sampling, tokens, length, limit
    state = decode.begin(params, *given, filled, drafter=drafter, log_prob=log_prob)
    return pin(state, shardings), whole(filled.features, shardings)


def nothing(params: Params, target: Target, drafter: Drafter, slots: int, dtype):
    """What a prompt would leave that has nothing in common with any."""

    def one() -> Filled:
        tokens, length = jnp.zeros((1, slots), jnp.int32), jnp.ones(1, jnp.int32)
        taps = drafter.shape.taps
        return fill_cache(
            target, params.target, tokens, length, slots=slots, taps=taps, dtype=dtype
        )

    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one))
