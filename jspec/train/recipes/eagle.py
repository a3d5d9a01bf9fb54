"""Recipes of EAGLE-1 (and -2) and EAGLE-3."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jspec.drafters.eagle import Weights
from jspec.drafters.published_eagle import Head, save_eagle
from jspec.drafters.tensors import target_head
from jspec.models import Model
from jspec.train.corpus import Corpus
from jspec.train.eagle import pairs, regression, shifted, training_time_test
from jspec.train.packing import Rows
from jspec.train.recipes.recipe import Recipe, draft_ids, frozen
from jspec.train.starts import fresh_eagle1, fresh_eagle3, with_vocabulary
from jspec.types import Array


def eagle3(
    target: Model,
    corpus: Corpus,
    *,
    taps: tuple[int, ...] | None = None,
    draft_vocab: int | None = None,
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
      draft_vocab: ids the head can draft, the corpus' most frequent; all, if the target
        has fewer. None is 8,192, or what ``start`` has.
      steps, decay: of the training-time test.
      start: a head to go on from; its own taps are kept. Tokens that it did not know
        begin with the target's rows.
      seed: of the weights that have no better start.
    """
    layers = target.config.layers
    # Lists that begin with 1 mean something else in published configs.
    low = layers // 3 if layers >= 6 else 0
    taps = taps or (low, 2 * layers // 3, layers - 1)
    if start is None or draft_vocab is not None:
        vocab_size = target.config.vocab_size
        ids = draft_ids(corpus, draft_vocab, vocab_size)
        ids = np.arange(vocab_size, dtype=np.int32) if ids is None else ids
        if start is None:
            start = fresh_eagle3(target, taps, ids, jax.random.key(seed))
        else:
            start = with_vocabulary(start, target, ids)
    design = start.design

    def loss(weights: Weights, teacher: Array, rows: Rows, key: Array):
        del key
        given = pairs(rows, rows.features, teacher, weights.to_target)
        return training_time_test(design, weights, given, steps=steps, decay=decay)

    return frozen(
        start.weights,
        {"embed": start.weights.embed, "to_target": start.weights.to_target},
        loss,
        lambda weights, folder: save_eagle(Head(design, weights), folder),
        teacher=target_head(target),
        taps=design.taps,
    )


def eagle1(
    target: Model,
    corpus: Corpus,
    *,
    draft_vocab: int | None = None,
    head_weight: float = 0.1,
    start: Head | None = None,
    seed: int = 0,
) -> Recipe:
    """EAGLE-1 (and -2, whose network it is) with one layer of the target's sizes.

    Args:
      target: gives the frozen head and the starting weights.
      corpus: gives the draft vocabulary.
      draft_vocab: ids the head can draft, the corpus' most frequent; all, if the target
        has fewer. None is 8,192, or what ``start`` has.
      head_weight: of the cross-entropy beside the regression; the authors' is 0.1.
      start: a head to go on from.
      seed: of the weights that have no better start.
    """
    if start is None or draft_vocab is not None:
        ids = draft_ids(corpus, draft_vocab, target.config.vocab_size)
        start = start or fresh_eagle1(target, jax.random.key(seed))
        start = _over(start, target, ids)
    design, weights = start.design, start.weights

    def loss(weights: Weights, teacher: Array, rows: Rows, key: Array):
        given = pairs(rows, rows.hidden, teacher, weights.to_target)
        truth = shifted(rows.hidden, 1)
        return regression(design, weights, given, truth, key, head_weight=head_weight)

    names = ("embed", "head", "to_target")
    return frozen(
        weights,
        {name: getattr(weights, name) for name in names},
        loss,
        lambda weights, folder: save_eagle(Head(design, weights), folder),
        teacher=target_head(target),
    )


def _over(head: Head, target: Model, ids: np.ndarray | None) -> Head:
    """A head that drafts only ``ids``, with the target's rows for them; None is all."""
    rows = target_head(target, ids)
    to_target = None if ids is None else jnp.asarray(ids)
    weights = dataclasses.replace(head.weights, head=rows, to_target=to_target)
    return Head(head.design, weights)
