"""A store of texts to copy from: tokens and their suffix array, searched on the device.

The store of REST (He et al. 2311.08252) and the shared tree of suffix decoding. All texts
stand one after another with a negative id between them; ``order`` lists their positions as
sorted by the tokens that follow. The occurrences of any n-gram are a range of it, found by
bisection, and because the range is sorted an even sample of it meets every continuation
about as often as its share.

It is searched inside the round: twice 24 steps of bisection for 10 million tokens, all
lengths at once, are less than a trip to the host and back, and the round stays one program.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jspec.drafters.occurrences import follow
from jspec.drafters.paths import Paths
from jspec.types import Array

SEPARATOR = -1
_FILES = "tokens.npy", "order.npy"


@struct.dataclass
class Store:
    """``tokens [T]`` int32 with ``SEPARATOR`` after each text, ``order [T]`` int32."""

    tokens: Array | np.ndarray
    order: Array | np.ndarray

    def on_device(self) -> Store:
        """The store as device arrays, so that a call need not copy it anew."""
        return Store(jnp.asarray(self.tokens), jnp.asarray(self.order))


class Hits(NamedTuple):
    """For the last 1 .. M tokens of a text: ``reach [M, K]`` and ``paths [M, K, G]``.

    ``count [M]`` is the number of occurrences, of which up to K are sampled.
    """

    count: Array
    reach: Array
    paths: Paths


def build(texts: Iterable[Sequence[int]], compared: int = 40) -> Store:
    """A store of texts, each a sequence of token ids.

    Args:
      texts: what to copy from.
      compared: tokens by which positions are sorted at least; n-gram and continuation
        together need no more.

    Raises:
      ValueError: no token, ids below 0, or more tokens than int32 can number.
    """
    parts = []
    for text in texts:
        ids = np.asarray(text, np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < 2**31:
            raise ValueError(f"a text holds the id {ids.min()}; ids are 0 .. 2**31 - 1")
        parts += [ids.astype(np.int32), np.array([SEPARATOR], np.int32)]
    tokens = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    if not np.any(tokens != SEPARATOR):
        raise ValueError("there is no token to store; give at least one text")
    if tokens.size >= 2**31:
        raise ValueError(f"{tokens.size} tokens; a store holds fewer than 2**31")
    return Store(tokens, _sorted(tokens, compared))


def _sorted(tokens: np.ndarray, compared: int) -> np.ndarray:
    """Positions sorted by their next ``compared`` tokens or more, by doubling.

    Ranks by the first h tokens of two positions h apart give ranks by 2 h.
    """
    rank = tokens.astype(np.int64) - SEPARATOR + 1  # 0 is beyond the end
    order, span = np.argsort(rank, kind="stable"), 1
    while span < compared:
        later = np.zeros_like(rank)
        later[:-span] = rank[span:]
        key = rank * (int(rank.max()) + 1) + later
        order = np.argsort(key, kind="stable")
        ordered = key[order]
        step = np.concatenate([[True], ordered[1:] != ordered[:-1]])
        rank = np.empty_like(rank)
        rank[order] = np.cumsum(step)
        if rank.max() == rank.size:
            break
        span *= 2
    return order.astype(np.int32)


def save(store: Store, folder: str | Path) -> None:
    """Writes ``tokens.npy`` and ``order.npy`` into a folder, which is made."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in zip(_FILES, (store.tokens, store.order), strict=True):
        np.save(folder / name, np.asarray(array))


def load(folder: str | Path) -> Store:
    """A store from its folder, memory-mapped: pages are read when they are needed.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: the two do not fit together.
    """
    folder = Path(folder)
    missing = [name for name in _FILES if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{folder} holds no {missing[0]}; build a store with jspec store"
        )
    tokens, order = (np.load(folder / name, mmap_mode="r") for name in _FILES)
    if tokens.shape != order.shape or tokens.ndim != 1:
        raise ValueError(
            f"{folder}: tokens of shape {tokens.shape}, order of {order.shape}; build "
            "the store anew"
        )
    return Store(tokens, order)


def check_ids(store: Store, vocab_size: int) -> None:
    """Raises ValueError if a stored id is outside the target's vocabulary."""
    largest = int(np.max(store.tokens))
    if largest >= vocab_size:
        raise ValueError(
            f"the store holds the id {largest}, but the target has {vocab_size} tokens; "
            "build the store with the target's tokenizer"
        )


def search(
    store: Store, tokens: Array, length: Array, longest: int, count: int, size: int
) -> Hits:
    """Occurrences of the last 1 .. ``longest`` tokens of one text, and what followed.

    Args:
      store: where to look.
      tokens: ``[T]`` the text.  length: scalar, its committed tokens.
      longest: M.  count: K, most occurrences taken of each.  size: G, tokens of each.
    """
    lower, upper = _range(store, tokens, length, longest)
    hits = jnp.where(jnp.arange(1, longest + 1) <= length, upper - lower, 0)
    # Evenly over the range; all of it, one by one, where it holds no more than K.
    taken = jnp.minimum(hits, count)[:, None]
    step = jnp.arange(count)
    # In two parts, for the product of a range and K may overflow.
    whole, rest = hits[:, None] // count, hits[:, None] % count
    even = step * whole + (step * rest) // count
    at = lower[:, None] + jnp.where(hits[:, None] <= count, step, even)
    reach = step < taken
    order, stored = jnp.asarray(store.order), jnp.asarray(store.tokens)
    start = order[jnp.where(reach, at, 0)]
    end = start + jnp.arange(longest)[:, None]  # of the n-gram of 1, 2 .. tokens
    end = jnp.where(reach, end, -1)
    found = follow(stored, jnp.int32(stored.shape[0]), end.ravel(), size)
    shape = longest, count, size
    return Hits(hits, reach, Paths(*(x.reshape(shape) for x in found)))


def _range(store: Store, tokens: Array, length: Array, longest: int):
    """Where in ``order`` the last 1 .. M tokens begin and end: two ``[M]``."""
    order, stored = jnp.asarray(store.order), jnp.asarray(store.tokens)
    size = jnp.arange(1, longest + 1)[:, None]
    step = jnp.arange(longest)
    wanted = tokens[jnp.clip(length - size + step, 0, tokens.shape[0] - 1)]
    inside = step < size

    def before(at: Array, below: Array) -> Array:
        """Is what stands at rank ``at [2, M]`` left of the n-gram, or not right of it?"""
        place = order[at][..., None] + step
        token = jnp.where(
            place < stored.shape[0],
            stored[jnp.minimum(place, stored.shape[0] - 1)],
            SEPARATOR - 1,
        )
        apart = inside & (token != wanted)
        first = jnp.argmax(apart, -1)[..., None]
        less = jnp.take_along_axis(token < wanted, first, -1)[..., 0]
        return jnp.where(jnp.any(apart, -1), less, below)

    total = stored.shape[0]
    # At equal ones the search for the lower end stops, that for the upper goes on.
    below = jnp.array([[False], [True]])

    def halve(_, ends):
        low, high = ends
        middle = low + (high - low) // 2
        left = before(jnp.minimum(middle, total - 1), below) & (low < high)
        return jnp.where(left, middle + 1, low), jnp.where(left, high, middle)

    start = jnp.zeros((2, longest), jnp.int32), jnp.full((2, longest), total, jnp.int32)
    low, _ = lax.fori_loop(0, math.ceil(math.log2(total + 1)), halve, start)
    return low[0], low[1]
