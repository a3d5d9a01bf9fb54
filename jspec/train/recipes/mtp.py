"""Recipe of prediction modules."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from jspec.drafters.eagle import Weights
from jspec.drafters.published_mtp import Modules, save_mtp
from jspec.drafters.tensors import target_head
from jspec.models import Model
from jspec.train.corpus import Corpus
from jspec.train.mtp import fast_mtp, prediction, texts
from jspec.train.packing import Rows
from jspec.train.recipes.recipe import Recipe, draft_ids
from jspec.train.starts import fresh_mtp
from jspec.types import Array


def mtp(
    target: Model,
    corpus: Corpus,
    *,
    steps: int = 3,
    beta: float = 0.6,
    draft_vocab: int | None = None,
    start: Modules | None = None,
    seed: int = 0,
) -> Recipe:
    """A prediction module that is used again at every depth, as FastMTP trains it.

    Args:
      steps, beta: depths and their weights, see ``train.mtp.fast_mtp``.
      draft_vocab: ids that a single module drafts, the corpus' most frequent, and labels
        that count; several know all. None is those of ``start``, or 8,192.
      start: modules to go on from, a target's own for example.
      seed: of the weights that have no better start.
    """
    if start is None:
        start = fresh_mtp(target, jax.random.key(seed))
    design, depths = start.design, fast_mtp(steps, beta)

    known = start.weights[0].to_target
    ids = None if known is None else np.asarray(known)
    if len(start.weights) == 1 and (ids is None or draft_vocab is not None):
        ids = draft_ids(corpus, draft_vocab, target.config.vocab_size)

    def whole(frozen, params) -> tuple[Weights, ...]:
        embed, head, ids = frozen
        return tuple(
            dataclasses.replace(p, embed=embed, head=head, to_target=ids)
            for p in params
        )

    def loss(frozen, params, rows: Rows, key: Array):
        del key
        return prediction(design, whole(frozen, params), texts(rows), depths)

    frozen = (
        target.params.embed,
        target_head(target, ids),
        None if ids is None else jnp.asarray(ids),
    )
    return Recipe(
        taps=(),
        params=tuple(
            dataclasses.replace(w, embed=None, head=None, to_target=None)
            for w in start.weights
        ),
        loss=Partial(loss, frozen),
        save=lambda params, folder: save_mtp(
            Modules(design, whole(frozen, params)), folder
        ),
    )
