"""Documents packed into rows of one length, and batches of rows by step number."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import struct

if TYPE_CHECKING:
    from jspec.train.corpus import Corpus


@struct.dataclass
class Rows:
    """Packed documents; R rows of a corpus, or the B rows of a batch.

    Attributes:
      tokens: ``[R, T]`` int32; 0 on padding.
      document: ``[R, T]`` int32, number of the token's document in its row, -1 on
        padding.
      position: ``[R, T]`` int32, place of the token in its document; 0 on padding.
      mask: ``[R, T]`` bool, True for tokens of answers.
      features, hidden: ``[R, T, F]`` and ``[R, T, M]``, what the target made of the
        rows (``jspec.train.features``), or None.
    """

    tokens: Any
    document: Any
    position: Any
    mask: Any
    features: Any = None
    hidden: Any = None

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, index: np.ndarray) -> Rows:
        """The rows of these numbers."""
        return jax.tree.map(lambda x: x[index], self)


def rows(corpus: Corpus, length: int, seed: int = 0) -> Rows:
    """Packs a corpus into rows of ``length`` tokens.

    A document is never split over rows, so that every token has its whole context: it
    goes to the row with the least room that still holds it, long documents first, and
    the rest of a document that is longer than a row is cut off. The rows are shuffled,
    so that the first of them are a fair sample. Equal arguments give equal rows.

    Raises:
      ValueError: ``length < 2``, or no document has an answer within ``length``.
    """
    if length < 2:
        raise ValueError(f"rows of {length} tokens; they need at least 2")
    docs = [(d.tokens[:length], d.mask[:length]) for d in corpus.documents]
    docs = [d for d in docs if d[1].any()]
    if not docs:
        raise ValueError(
            f"none of {len(corpus.documents)} documents has an answer within its first "
            f"{length} tokens; use longer rows or another corpus"
        )
    rng = np.random.default_rng(seed)
    docs = [docs[i] for i in rng.permutation(len(docs))]
    docs.sort(key=lambda d: -len(d[0]))  # stable: equal lengths stay shuffled

    packed: list[list] = []
    room = np.full(len(docs), length)
    for doc in docs:
        size = len(doc[0])
        fits = np.flatnonzero(room[: len(packed)] >= size)
        row = int(fits[room[fits].argmin()]) if len(fits) else len(packed)
        if row == len(packed):
            packed.append([])
        packed[row].append(doc)
        room[row] -= size
    return _arrays([packed[i] for i in rng.permutation(len(packed))], length)


def _arrays(packed: list[list], length: int) -> Rows:
    shape = len(packed), length
    out = Rows(
        tokens=np.zeros(shape, np.int32),
        document=np.full(shape, -1, np.int32),
        position=np.zeros(shape, np.int32),
        mask=np.zeros(shape, bool),
    )
    for row, docs in enumerate(packed):
        at = 0
        for number, (tokens, mask) in enumerate(docs):
            span = row, slice(at, at + len(tokens))
            out.tokens[span], out.mask[span] = tokens, mask
            out.document[span], out.position[span] = number, np.arange(len(tokens))
            at += len(tokens)
    return out


def order(count: int, size: int, seed: int, step: int) -> np.ndarray:
    """Numbers ``[size]`` of the rows in batch ``step``: a function of the arguments only.

    Every epoch shuffles the ``count`` rows anew; those that do not fill a batch are left
    out of it.

    Raises:
      ValueError: unless ``1 <= size <= count``.
    """
    if not 1 <= size <= count:
        raise ValueError(
            f"batches of {size} rows from {count}; a batch needs at least 1 and at most "
            "all rows, so use smaller batches or a larger corpus"
        )
    epoch, at = divmod(step, count // size)
    return _shuffled(count, seed, epoch)[at * size : (at + 1) * size]


@functools.lru_cache(maxsize=4)
def _shuffled(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(count)


def batches(packed: Rows, size: int, seed: int = 0) -> Callable[[int], Rows]:
    """``data(step)``: batch ``step`` of an endless, shuffled run over the rows.

    Batches are addressed by number, so a run that is resumed needs no other state.

    Raises:
      ValueError: as ``order``.
    """
    order(len(packed), size, seed, 0)
    return lambda step: packed.take(order(len(packed), size, seed, step))
