"""What is trained for each method: where it begins, what it minimises, what it leaves.

A recipe joins a head to its target's frozen arrays, so that ``fit`` sees parameters and a
pure loss. Heads begin at the target's own last layer, norm and head where they can.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from jspec import models
from jspec.drafters.eagle import Design, Weights
from jspec.drafters.heads import Blockwise, Medusa, init_blockwise, init_medusa
from jspec.drafters.published_eagle import Head, save_eagle, target_head
from jspec.drafters.published_medusa import save_medusa
from jspec.drafters.published_mtp import Modules, save_mtp
from jspec.drafters.stored_blockwise import save_blockwise
from jspec.models import Model
from jspec.train import heads
from jspec.train.corpus import Corpus
from jspec.train.eagle import pairs, regression, shifted, training_time_test
from jspec.train.mtp import fast_mtp, prediction, texts
from jspec.train.packing import Rows
from jspec.train.small import distillation, fresh
from jspec.train.starts import float32, fresh_eagle1, fresh_eagle3, fresh_mtp
from jspec.types import Array


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


def eagle3(
    target: Model,
    corpus: Corpus,
    *,
    taps: tuple[int, ...] | None = None,
    draft_vocab: int = 8192,
    steps: int = 4,
    decay: float = 0.8,
    start: Head | None = None,
    seed: int = 0,
) -> Recipe:
    """EAGLE-3 with one layer of the target's sizes.

    Args:
      target: gives embedding, teacher and starting weights.
      corpus: gives the draft vocabulary.
      taps: features to read; by default what layers ``n/3``, ``2n/3`` and ``n - 1``
        receive, for the last of them is where the head begins.
      draft_vocab: ids the head can draft; all, if the target has fewer.
      steps, decay: of the training-time test.
      start: a head to go on from; its own taps and vocabulary are kept.
      seed: of the weights that have no better start.
    """
    layers = target.config.layers
    # Lists that begin with 1 mean something else in published configs.
    low = layers // 3 if layers >= 6 else 0
    taps = taps or (low, 2 * layers // 3, layers - 1)
    if start is None:
        vocab_size = target.config.vocab_size
        ids = vocabulary(corpus, min(draft_vocab, vocab_size), vocab_size)
        start = fresh_eagle3(target, taps, ids, jax.random.key(seed))
    design, whole = start.design, start.weights

    def loss(frozen, params: Weights, rows: Rows, key: Array):
        del key
        embed, ids, head = frozen
        weights = dataclasses.replace(params, embed=embed, to_target=ids)
        given = pairs(rows, rows.features, head, ids)
        return training_time_test(design, weights, given, steps=steps, decay=decay)

    frozen = whole.embed, whole.to_target, target_head(target)
    return Recipe(
        taps=design.taps,
        params=dataclasses.replace(whole, embed=None, to_target=None),
        loss=Partial(loss, frozen),
        save=_saver(design, frozen),
    )


def eagle1(
    target: Model,
    corpus: Corpus,
    *,
    draft_vocab: int = 8192,
    start: Head | None = None,
    seed: int = 0,
) -> Recipe:
    """EAGLE-1 (and -2, whose network it is) with one layer of the target's sizes.

    Args:
      target: gives the frozen head and the starting weights.
      corpus: gives the draft vocabulary.
      draft_vocab: ids that are drafted; training knows all, as it is published.
      start: a head to go on from.
      seed: of the weights that have no better start.
    """
    ids = _draft_ids(corpus, draft_vocab, target.config.vocab_size)
    if start is None:
        start = fresh_eagle1(target, jax.random.key(seed))
    design, whole = start.design, start.weights

    def loss(frozen, params: Weights, rows: Rows, key: Array):
        embed, _, head = frozen
        weights = dataclasses.replace(params, embed=embed, head=head)
        given = pairs(rows, rows.hidden, head, None)
        return regression(design, weights, given, shifted(rows.hidden, 1), key)

    frozen = whole.embed, None, target_head(target)
    saved = whole.embed, ids, target_head(target, ids)
    return Recipe(
        taps=(),
        params=dataclasses.replace(whole, embed=None, head=None, to_target=None),
        loss=Partial(loss, frozen),
        save=_saver(design, saved),
    )


def mtp(
    target: Model,
    corpus: Corpus,
    *,
    steps: int = 3,
    beta: float = 0.6,
    draft_vocab: int = 8192,
    start: Modules | None = None,
    seed: int = 0,
) -> Recipe:
    """A prediction module that is used again at every depth, as FastMTP trains it.

    Args:
      steps, beta: depths and their weights, see ``train.mtp.fast_mtp``.
      draft_vocab: ids that a single module drafts; training knows all.
      start: modules to go on from, a target's own for example.
      seed: of the weights that have no better start.
    """
    if start is None:
        start = fresh_mtp(target, jax.random.key(seed))
    design, depths = start.design, fast_mtp(steps, beta)

    ids = None
    if len(start.weights) == 1:
        ids = _draft_ids(corpus, draft_vocab, target.config.vocab_size)

    def whole(frozen, params, ids=None) -> tuple[Weights, ...]:
        embed, head = frozen
        return tuple(
            dataclasses.replace(p, embed=embed, head=head, to_target=ids)
            for p in params
        )

    def loss(frozen, params, rows: Rows, key: Array):
        del key
        return prediction(design, whole(frozen, params), texts(rows), depths)

    frozen = target.params.embed, target_head(target)
    return Recipe(
        taps=(),
        params=tuple(
            dataclasses.replace(w, embed=None, head=None, to_target=None)
            for w in start.weights
        ),
        loss=Partial(loss, frozen),
        save=lambda params, folder: save_mtp(
            Modules(design, whole(frozen, params, ids)), folder
        ),
    )


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
        ids = _draft_ids(corpus, draft_vocab, vocab_size)
        rows = jnp.asarray(target_head(target, ids), jnp.float32)
        to_target = None if ids is None else jnp.asarray(ids)
        start = dataclasses.replace(init_medusa(rows, count), to_target=to_target)
    to_target = start.to_target

    def loss(to_target, params: Medusa, rows: Rows, key: Array):
        del key
        weights = dataclasses.replace(params, to_target=to_target)
        return heads.medusa(
            weights, rows.hidden, rows.tokens, rows.mask, rows.document, decay=decay
        )

    return Recipe(
        taps=(),
        params=dataclasses.replace(start, to_target=None),
        loss=Partial(loss, to_target),
        save=lambda params, folder: save_medusa(
            dataclasses.replace(params, to_target=to_target),
            folder,
            jnp.bfloat16,
            base=target.name,
            vocab_size=vocab_size,
        ),
    )


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
        ids = _draft_ids(corpus, draft_vocab, vocab_size)
        rows = jnp.asarray(target_head(target, ids), jnp.float32)
        start = dataclasses.replace(
            init_blockwise(jax.random.key(seed), rows, count, wide),
            to_target=None if ids is None else jnp.asarray(ids),
        )
    frozen = start.vocab, start.to_target

    def whole(frozen, params: Blockwise) -> Blockwise:
        vocab, to_target = frozen
        return dataclasses.replace(params, vocab=vocab, to_target=to_target)

    def loss(frozen, params: Blockwise, rows: Rows, key: Array):
        del key
        return heads.blockwise(
            whole(frozen, params), rows.hidden, rows.tokens, rows.mask, rows.document
        )

    return Recipe(
        taps=(),
        params=dataclasses.replace(start, vocab=None, to_target=None),
        loss=Partial(loss, frozen),
        save=lambda params, folder: save_blockwise(
            whole(frozen, params), folder, vocab_size
        ),
    )


def small(
    target: Model,
    corpus: Corpus,
    *,
    hidden: int = 160,
    layers: int = 4,
    head_dim: int = 32,
    start: Model | None = None,
    seed: int = 0,
) -> Recipe:
    """An independent small language model, distilled from the target.

    Args:
      target: the teacher, whose tokens it shares.
      hidden, layers, head_dim: sizes; its cost is mostly ``hidden`` times the vocabulary.
      start: a model to go on from; its own sizes are kept.
      seed: of the layers.
    """
    del corpus
    if start is None:
        key = jax.random.key(seed)
        start = fresh(target, key, hidden=hidden, layers=layers, head_dim=head_dim)
    model = start

    def loss(head, params, rows: Rows, key: Array):
        del key
        product = params.embed if params.head is None else params.head
        return distillation(model.target, params, product, head, rows)

    def save(params, folder: Path) -> Path:
        half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        return models.save((model.config, half), folder, tokenizer=target.tokenizer)

    return Recipe((), float32(model.params), Partial(loss, target_head(target)), save)


def _draft_ids(corpus: Corpus, size: int, vocab_size: int) -> np.ndarray | None:
    """Target ids of a draft vocabulary, or None if it is the target's own."""
    return None if size >= vocab_size else vocabulary(corpus, size, vocab_size)


RECIPES: dict[str, Callable[..., Recipe]] = {
    "blockwise": blockwise,
    "eagle1": eagle1,
    "eagle3": eagle3,
    "medusa": medusa,
    "mtp": mtp,
    "small": small,
}


def _saver(design: Design, frozen) -> Callable[[Any, Path], Path]:
    def save(params: Weights, folder: Path) -> Path:
        embed, ids, head = frozen
        own = head if params.head is None else params.head
        weights = dataclasses.replace(params, embed=embed, to_target=ids, head=own)
        return save_eagle(Head(design, weights), folder)

    return save
