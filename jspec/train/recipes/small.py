"""Recipe of an independent small model."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from jspec import models
from jspec.drafters.tensors import target_head
from jspec.models import Model
from jspec.train.corpus import Corpus
from jspec.train.packing import Rows
from jspec.train.recipes.recipe import Recipe
from jspec.train.small import distillation
from jspec.train.starts import float32, fresh_small
from jspec.types import Array


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
        sizes = {"hidden": hidden, "layers": layers, "head_dim": head_dim}
        start = fresh_small(target, key, **sizes)
    model = start

    def loss(head, params, rows: Rows, key: Array):
        del key
        product = params.embed if params.head is None else params.head
        return distillation(model.target, params, product, head, rows)

    def save(params, folder: Path) -> Path:
        half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        return models.save((model.config, half), folder, tokenizer=target.tokenizer)

    return Recipe((), float32(model.params), Partial(loss, target_head(target)), save)
