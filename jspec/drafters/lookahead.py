"""Jacobi and Lookahead decoding: the target's own guesses about its future.

Fu et al. 2402.02057. Nothing is trained and nothing is copied from the text: rows that the
target scores beside the pending token tell what it would say after a guess, and the
n-grams that form over the rounds are the drafts of later ones.

The window is made of probe nodes. With ``C`` columns, column 0 is the root, columns
1 .. C - 1 of level 0 are a chain below it, and token j of level l hangs below token j of
level l - 1: what a token may see is what its ancestors are. Row j of the newest level
completes the n-gram that column j spells. The window then moves by one place whatever was
accepted, so that its level 0 is what level 1 was.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jspec import sampling as smp
from jspec.drafters import paths
from jspec.drafters.paths import Paths
from jspec.state import pending
from jspec.types import Array, Block, Context, Drafter, DraftShape, Feedback, chain


@functools.cache
def jacobi(gamma: int = 7) -> Drafter:
    """Jacobi iteration: a chain of guesses, replaced by what the target said after each.

    Guess i + 1 of a round is the best token after guess i, however wrong that was; of a
    round that emits n tokens the first n are decided and the rest moves up. At
    temperature 0 at least one more guess is right after every round.

    Args:
      gamma: guesses a round.

    Raises:
      ValueError: if ``gamma < 1``.
    """
    if gamma < 1:
        raise ValueError(f"gamma is {gamma}; a drafter needs at least 1")

    def init(params, context: Context) -> Array:
        del params
        return _from_prompt(context, gamma)

    def propose(params, guess: Array, key, context: Context):
        del params, key
        return chain(jnp.concatenate([pending(context)[:, None], guess], 1)), guess

    def update(params, guess: Array, feedback: Feedback) -> Array:
        del params
        said = smp.argmax(feedback.logits)
        emitted = feedback.verdict.n_accept[:, None] + 1
        at = jnp.minimum(emitted + jnp.arange(gamma), gamma)
        return jnp.where(emitted > 0, jnp.take_along_axis(said, at, 1), guess)

    return Drafter(DraftShape(gamma + 1, gamma), init, propose, update)


@struct.dataclass
class Lookahead:
    """State of a lookahead drafter; n is its n-gram size, C its widest window.

    Attributes:
      window: ``[B, n - 1, C]`` int32; column 0 of level 0 is the pending token's place.
      levels: ``[B]`` int32, levels that are filled, 1 .. n - 1.
      pool: ``[B, S, n]`` int32 n-grams, -1 where there is none.
      used: ``[B, S]`` int32, when an n-gram was last seen; the least is the oldest.
      clock: ``[B]`` int32, n-grams seen.
    """

    window: Array
    levels: Array
    pool: Array
    used: Array
    clock: Array


class _Shape(NamedTuple):
    """Where the window's nodes are when 1, 2 .. n - 1 levels are filled; ``[n - 1, N']``.

    ``level`` and ``column`` of every node without the root, ``parent``, ``live``; and
    ``row [n - 1, C]``, the node whose successor is the next level's token, -1 for none.
    """

    level: np.ndarray
    column: np.ndarray
    parent: np.ndarray
    live: np.ndarray
    row: np.ndarray


def _window_shape(window: int, size: int) -> _Shape:
    """The window while it fills and when it is full, as constant arrays.

    With s levels level 0 has ``window + size - 2 - s`` tokens beside the root and every
    other level one more: a token is lost at the left in every round until all are there.
    """
    widest = window + size - 2
    stages = [_stage(s, widest + 1 - s, widest) for s in range(1, size)]
    nodes = max(len(level) for level, *_ in stages)

    def pad(values: list[int]) -> list[int]:
        return values + [0] * (nodes - len(values))

    level, column, parent, row = zip(*stages, strict=True)
    return _Shape(
        np.array([pad(x) for x in level]),
        np.array([pad(x) for x in column]),
        np.array([pad(x) for x in parent]),
        np.array([pad([1] * len(x)) for x in level]) == 1,
        np.array(row),
    )


def _stage(levels: int, columns: int, widest: int):
    """Levels, columns and parents of the nodes, and the rows that say what comes next."""
    node = {(0, 0): 0}
    for j in range(1, columns):
        node[0, j] = len(node)
    for k in range(1, levels):
        for j in range(columns):
            node[k, j] = len(node)
    above = {(k, j): (k - 1, j) if k else (0, j - 1) for k, j in node}
    places = list(node)[1:]
    newest = [node[levels - 1, j] for j in range(columns)]
    return (
        [k for k, _ in places],
        [j for _, j in places],
        [node[above[place]] for place in places],
        newest + [-1] * (widest - columns),
    )


@functools.cache
def lookahead(
    window: int = 7, size: int = 5, guesses: int = 7, pool: int = 4096
) -> Drafter:
    """Lookahead decoding: window W, n-grams of N tokens, G guesses verified a round.

    The block is a tree of up to G stored n-grams that begin with the pending token, and
    ``(N - 1) W`` nodes of the window, so it needs a machine with arithmetic to spare. The
    first ``N - 2`` rounds fill the window. Drafts are point masses.

    Args:
      window: W, columns of the full window.
      size: N, tokens of an n-gram.
      guesses: G, most n-grams verified at once; the latest ones are taken.
      pool: n-grams kept a sequence; the least recently seen one goes first.

    Raises:
      ValueError: a window or guesses below 1, n-grams below 3 tokens, a pool that does
        not hold what a round finds.
    """
    if min(window, guesses) < 1 or size < 3:
        raise ValueError(
            f"window {window}, n-grams of {size}, {guesses} guesses; need at least 1, 3, 1"
        )
    if pool < max(window, guesses):
        raise ValueError(
            f"a pool of {pool} n-grams; a round needs {max(window, guesses)}"
        )
    shape, depth = _window_shape(window, size), size - 1
    nodes = 1 + guesses * depth + shape.level.shape[1]

    def init(params, context: Context) -> Lookahead:
        del params
        batch, widest = context.length.shape[0], shape.row.shape[1]
        start = jnp.zeros((batch, depth, widest), jnp.int32)
        return Lookahead(
            window=start.at[:, 0].set(_from_prompt(context, widest)),
            levels=jnp.ones(batch, jnp.int32),
            pool=jnp.full((batch, pool, size), -1, jnp.int32),
            used=jnp.zeros((batch, pool), jnp.int32),
            clock=jnp.zeros(batch, jnp.int32),
        )

    def propose(params, state: Lookahead, key, context: Context):
        del params, key
        root = pending(context)
        state = dataclasses.replace(state, window=state.window.at[:, 0, 0].set(root))
        found = jax.vmap(functools.partial(_guesses, guesses))(state, root)
        return _block(shape, root, found, state), state

    def update(params, state: Lookahead, feedback: Feedback) -> Lookahead:
        del params
        said = smp.argmax(feedback.logits)
        new = jax.vmap(functools.partial(_advance, shape, guesses * depth))(state, said)
        ran = feedback.verdict.n_accept >= 0

        def choose(a, b):
            return jnp.where(ran.reshape(-1, *[1] * (a.ndim - 1)), a, b)

        return jax.tree.map(choose, new, state)

    return Drafter(DraftShape(nodes, depth), init, propose, update)


def _from_prompt(context: Context, count: int) -> Array:
    """``count`` tokens from all over the prompts, ``[B, count]``: where guessing begins."""
    # A stride prime to most lengths: no two places alike, and no key is needed.
    at = (1 + jnp.arange(count)) * 7919 % jnp.maximum(context.length, 1)[:, None]
    return jnp.take_along_axis(context.tokens, at, 1)


def _guesses(count: int, state: Lookahead, root: Array) -> Paths:
    """The n-grams after ``root`` seen last, the latest first, of one sequence."""
    fits = state.pool[:, 0] == root
    # As float32, of which top_k is a selection everywhere; of integers a sort on CPUs.
    used = jnp.where(fits, state.used, -1).astype(jnp.float32)
    seen, at = lax.top_k(used, count)
    token = state.pool[at, 1:]
    return Paths(token, jnp.broadcast_to((seen >= 0)[:, None], token.shape))


def _block(shape: _Shape, root: Array, found: Paths, state: Lookahead) -> Block:
    """Guesses, then the window as probe nodes."""
    guess = paths.block(root, *jax.vmap(paths.whole)(found))
    level, column, parent, live = (jnp.asarray(x)[state.levels - 1] for x in shape[:4])
    probe = jax.vmap(lambda w, i, j: w[i, j])(state.window, level, column)
    first = guess.token.shape[1] - 1  # window node i > 0 is node first + i of the block
    return Block(
        token=jnp.concatenate([guess.token, probe], 1),
        parent=jnp.concatenate(
            [guess.parent, jnp.where(live & (parent > 0), first + parent, 0)], 1
        ).astype(jnp.int32),
        live=jnp.concatenate([guess.live, live], 1),
        vote=jnp.concatenate([guess.vote, jnp.zeros_like(live)], 1),
    )


def _advance(shape: _Shape, first: int, state: Lookahead, said: Array) -> Lookahead:
    """One sequence's window after a round in which ``said [N]`` followed every node."""
    row = jnp.asarray(shape.row)[state.levels - 1]
    new = said[jnp.where(row > 0, first + row, 0)]  # row 0 is the root itself
    full = state.levels == state.window.shape[0]
    grown = state.window.at[state.levels].set(new, mode="drop")
    filling = dataclasses.replace(
        state, window=jnp.roll(grown, -1, 1), levels=state.levels + ~full
    )
    last = jnp.concatenate([state.window[1:], new[None]])
    count = shape.row.shape[1] + 1 - state.window.shape[0]
    found = jnp.concatenate([state.window, new[None]])[:, :count].T
    moving = _store(dataclasses.replace(state, window=last), found)
    return jax.tree.map(lambda a, b: jnp.where(full, a, b), moving, filling)


def _store(state: Lookahead, found: Array) -> Lookahead:
    """Puts n-grams ``found [W, n]`` into the pool, over those not seen for longest."""
    count = found.shape[0]
    twin = jnp.all(found[:, None] == found, -1)
    last = ~jnp.any(jnp.triu(twin, 1), -1)  # of equal ones the last is stored
    known = jnp.all(state.pool == found[:, None], -1)
    time = state.clock + 1 + jnp.arange(count)
    at = jnp.argmax(known, -1)
    is_known = jnp.any(known, -1)
    size = state.used.shape[0]
    used = state.used.at[jnp.where(is_known, at, size)].max(time, mode="drop")
    _, oldest = lax.top_k(-used.astype(jnp.float32), count)
    fresh = last & ~is_known
    slot = oldest[jnp.cumsum(fresh) - 1]
    slot = jnp.where(fresh, slot, size)
    return dataclasses.replace(
        state,
        pool=state.pool.at[slot].set(found, mode="drop"),
        used=used.at[slot].set(time, mode="drop"),
        clock=state.clock + count,
    )
