"""Recipes of heads that guess several tokens from one feature."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jspec.drafters.heads import Blockwise, Medusa, init_blockwise, init_medusa
from jspec.drafters.published_medusa import save_medusa
from jspec.drafters.stored_blockwise import save_blockwise
from jspec.drafters.tensors import target_head
from jspec.models import Model
from jspec.train import heads
from jspec.train.corpus import Corpus
from jspec.train.packing import Rows
from jspec.train.recipes.recipe import Recipe, draft_ids, frozen
from jspec.types import Array

_Heads = TypeVar("_Heads", Medusa, Blockwise)


def medusa(
    target: Model,
    corpus: Corpus,
    *,
    count: int = 4,
    draft_vocab: int = 4096,
    decay: float = 0.8,
    start: Medusa | None = None,
    seed: int = 0,
) -> Recipe:
    """Medusa-1: heads of the target's width that begin as its own head.

    Args:
      target: gives the starting weights.
      corpus: gives the draft vocabulary.
      count: heads, and so the deepest guess.
      draft_vocab: ids the heads can draft; the target's, if it has no more.
      decay: of the heads' weights in the loss.
      start: heads to go on from; their number and vocabulary are kept.
      seed: nothing is drawn; as for other recipes.
    """
    del seed
    vocab_size = target.config.vocab_size
    if start is None:
        ids = draft_ids(corpus, draft_vocab, vocab_size)
        start = _over(ids, init_medusa(_product(target, ids), count))

    def loss(weights: Medusa, teacher, rows: Rows, key: Array):
        del teacher, key
        return heads.medusa(weights, *_texts(rows), decay=decay)

    def save(weights: Medusa, folder: Path) -> Path:
        return save_medusa(
            weights,
            folder,
            jnp.bfloat16,
            base=target.name,
            vocab_size=vocab_size,
        )

    return frozen(start, {"to_target": start.to_target}, loss, save)


def blockwise(
    target: Model,
    corpus: Corpus,
    *,
    count: int = 4,
    wide: int = 256,
    draft_vocab: int = 4096,
    start: Blockwise | None = None,
    seed: int = 0,
) -> Recipe:
    """Blockwise heads under the target's own, frozen vocabulary product.

    Args:
      target: gives the product.
      corpus, draft_vocab, count, start: as for ``medusa``.
      wide: hidden units a head.
      seed: of the hidden layer.
    """
    vocab_size = target.config.vocab_size
    if start is None:
        ids = draft_ids(corpus, draft_vocab, vocab_size)
        key = jax.random.key(seed)
        start = _over(ids, init_blockwise(key, _product(target, ids), count, wide))

    def loss(weights: Blockwise, teacher, rows: Rows, key: Array):
        del teacher, key
        return heads.blockwise(weights, *_texts(rows))

    return frozen(
        start,
        {"vocab": start.vocab, "to_target": start.to_target},
        loss,
        lambda weights, folder: save_blockwise(weights, folder, vocab_size),
    )


def _product(target: Model, ids: np.ndarray | None) -> Array:
    """The target's vocabulary product ``[V', M]`` over ``ids``, float32."""
    return jnp.asarray(target_head(target, ids), jnp.float32)


def _over(ids: np.ndarray | None, head: _Heads) -> _Heads:
    """``head`` with the target ids of its rows."""
    to_target = None if ids is None else jnp.asarray(ids)
    return dataclasses.replace(head, to_target=to_target)


def _texts(rows: Rows) -> tuple[Array, Array, Array, Array]:
    return rows.hidden, rows.tokens, rows.mask, rows.document
