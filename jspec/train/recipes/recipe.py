"""What every recipe is, and the two things most of them share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.tree_util import Partial

from jspec.train.corpus import Corpus
from jspec.train.packing import Rows
from jspec.types import Array

DRAFT_VOCAB = 8192  # ids of a draft vocabulary, unless told otherwise


class Recipe(NamedTuple):
    """How a method is trained.

    Attributes:
      taps: the target's features it reads, besides the last hidden state.
      params: where training begins.
      loss: ``(params, rows, key) -> (scalar, metrics)``, see ``fit``.
      save: ``(params, folder) -> folder``, writes the head as published ones are.
    """

    taps: tuple[int, ...]
    params: Any
    loss: Callable
    save: Callable[[Any, Path], Path]


def frozen(
    start: Any,
    held: dict[str, Any],
    loss: Callable,
    save: Callable[[Any, Path], Path],
    *,
    teacher: Array | None = None,
    taps: tuple[int, ...] = (),
) -> Recipe:
    """A recipe in which some fields of a head stay as they are.

    Args:
      start: the head, a dataclass.
      held: names of fields, and what they are while it is trained.
      loss: ``(head, teacher, rows, key) -> (scalar, metrics)`` of the whole head.
      save: ``(head, folder) -> folder``, of the whole head.
      teacher: ``[V, M]`` the target's vocabulary product, for losses that ask for it.
      taps: as in ``Recipe``.
    """

    def whole(held: dict[str, Any], params: Any) -> Any:
        return dataclasses.replace(params, **held)

    def of(given, params: Any, rows: Rows, key: Array):
        held, teacher = given
        return loss(whole(held, params), teacher, rows, key)

    return Recipe(
        taps,
        dataclasses.replace(start, **dict.fromkeys(held)),
        Partial(of, (held, teacher)),
        lambda params, folder: save(whole(held, params), folder),
    )


def vocabulary(corpus: Corpus, size: int, vocab_size: int) -> np.ndarray:
    """The ``size`` most frequent ids of the corpus' answers, ascending.

    Ties go to the smaller id; ids that never occur fill up what is left.

    Raises:
      ValueError: unless ``1 <= size <= vocab_size``.
    """
    if not 1 <= size <= vocab_size:
        raise ValueError(
            f"a draft vocabulary of {size}; the target has {vocab_size} ids, and at "
            "least 1 is needed"
        )
    count = np.zeros(vocab_size, np.int64)
    for tokens, mask in corpus.documents:
        count += np.bincount(tokens[mask], minlength=vocab_size)
    return np.sort(np.argsort(-count, kind="stable")[:size]).astype(np.int32)


def draft_ids(corpus: Corpus, size: int | None, vocab_size: int) -> np.ndarray | None:
    """Target ids ``[V']`` of a draft vocabulary, or None if it is the target's own.

    Of no ``size`` it has 8,192.
    """
    size = DRAFT_VOCAB if size is None else size
    return None if size >= vocab_size else vocabulary(corpus, size, vocab_size)
