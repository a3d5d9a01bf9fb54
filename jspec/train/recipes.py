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

from jspec.drafters import eagle
from jspec.drafters.eagle import Design, Weights
from jspec.drafters.mtp import design_of
from jspec.drafters.published_eagle import Head, save_eagle, target_head
from jspec.drafters.published_mtp import Modules, save_mtp
from jspec.models import Model, linear
from jspec.models.config import Config
from jspec.train.corpus import Corpus
from jspec.train.eagle import pairs, regression, shifted, training_time_test
from jspec.train.mtp import fast_mtp, prediction, texts
from jspec.train.packing import Rows
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
    start: Head | None = None,
    seed: int = 0,
    **_: Any,
) -> Recipe:
    """EAGLE-1 (and -2, whose network it is) with one layer of the target's sizes."""
    del corpus
    if start is None:
        start = fresh_eagle1(target, jax.random.key(seed))
    design, whole = start.design, start.weights

    def loss(frozen, params: Weights, rows: Rows, key: Array):
        embed, _, head = frozen
        weights = dataclasses.replace(params, embed=embed, head=head)
        given = pairs(rows, rows.hidden, head, None)
        return regression(design, weights, given, shifted(rows.hidden, 1), key)

    frozen = whole.embed, None, target_head(target)
    return Recipe(
        taps=(),
        params=dataclasses.replace(whole, embed=None, head=None),
        loss=Partial(loss, frozen),
        save=_saver(design, frozen),
    )


def mtp(
    target: Model,
    corpus: Corpus,
    *,
    steps: int = 3,
    beta: float = 0.6,
    start: Modules | None = None,
    seed: int = 0,
    **_: Any,
) -> Recipe:
    """A prediction module that is used again at every depth, as FastMTP trains it.

    Args:
      steps, beta: depths and their weights, see ``train.mtp.fast_mtp``.
      start: modules to go on from, a target's own for example.
      seed: of the weights that have no better start.
    """
    del corpus
    if start is None:
        start = fresh_mtp(target, jax.random.key(seed))
    design, depths = start.design, fast_mtp(steps, beta)

    def whole(frozen, params) -> tuple[Weights, ...]:
        embed, head = frozen
        return tuple(dataclasses.replace(p, embed=embed, head=head) for p in params)

    def loss(frozen, params, rows: Rows, key: Array):
        del key
        return prediction(design, whole(frozen, params), texts(rows), depths)

    frozen = target.params.embed, target_head(target)
    return Recipe(
        taps=(),
        params=tuple(
            dataclasses.replace(w, embed=None, head=None) for w in start.weights
        ),
        loss=Partial(loss, frozen),
        save=lambda params, folder: save_mtp(
            Modules(design, whole(frozen, params)), folder
        ),
    )


RECIPES: dict[str, Callable[..., Recipe]] = {
    "eagle1": eagle1,
    "eagle3": eagle3,
    "mtp": mtp,
}


def _saver(design: Design, frozen) -> Callable[[Any, Path], Path]:
    def save(params: Weights, folder: Path) -> Path:
        embed, ids, head = frozen
        own = head if params.head is None else params.head
        weights = dataclasses.replace(params, embed=embed, to_target=ids, head=own)
        return save_eagle(Head(design, weights), folder)

    return save


def fresh_eagle3(target: Model, taps, ids: np.ndarray, key: Array) -> Head:
    """The target's last layer reading the last tap, blind to the embedding at first."""
    layer, config = _last_layer(target)
    width = config.hidden
    select = jnp.concatenate(
        [jnp.zeros((width, (len(taps) - 1) * width)), jnp.eye(width)], 1
    )
    qkv = jnp.concatenate([jnp.zeros_like(layer.qkv), layer.qkv], -1)
    noise = 0.01 * jax.random.normal(key, qkv.shape)
    weights = Weights(
        embed=target.params.embed,
        layers=(dataclasses.replace(layer, qkv=qkv + noise, attn_norm=None),),
        head=target_head(target, ids),
        fc=select,
        embed_norm=jnp.ones(width),
        hidden_norm=layer.attn_norm,
        final_norm=target.params.final_norm,
        to_target=jnp.asarray(ids),
    )
    return Head(Design(config, tuple(taps), eagle.eagle3, eagle.fuse), weights)


def fresh_eagle1(target: Model, key: Array) -> Head:
    """``fc`` passes the feature on; the layer begins as the target's last."""
    layer, config = _last_layer(target)
    width = config.hidden
    fc = jnp.concatenate([jnp.zeros((width, width)), jnp.eye(width)], 1)
    weights = Weights(
        embed=target.params.embed,
        layers=(dataclasses.replace(layer, attn_norm=None),),
        head=target_head(target),
        fc=fc + 0.01 * jax.random.normal(key, fc.shape),
        fc_bias=jnp.zeros(width),
    )
    return Head(Design(config, (-1,), eagle.eagle1, eagle.as_is), weights)


def fresh_mtp(target: Model, key: Array) -> Modules:
    """``fc`` passes the normed feature on; the layer begins as the target's last."""
    layer, config = _last_layer(target)
    width = config.hidden
    neutral = jnp.full(width, 0.0 if config.zero_centred else 1.0)
    fc = jnp.concatenate([jnp.zeros((width, width)), jnp.eye(width)], 1)
    weights = Weights(
        embed=target.params.embed,
        layers=(layer,),
        head=target_head(target),
        fc=fc + 0.01 * jax.random.normal(key, fc.shape),
        embed_norm=neutral,
        hidden_norm=neutral,
        final_norm=_whole(target.params.final_norm),
    )
    return Modules(design_of(config), (weights,))


def _last_layer(target: Model) -> tuple[Any, Config]:
    """A float32 copy of the target's last layer, and the config of a single such layer."""
    config, last = target.config, target.config.layers - 1
    experts = config.experts
    if experts is not None:
        dense = () if config.has_experts(last) else (0,)
        experts = dataclasses.replace(experts, dense_layers=dense)
    config = dataclasses.replace(
        config,
        layers=1,
        windows=(None,),
        ropes=config.ropes[-1:],
        experts=experts,
        mtp_layers=0,
    )
    return _whole(target.params.layers[-1]), config


def _whole(tree: Any) -> Any:
    """A float32 copy in which no product is cut into blocks."""
    return jax.tree.map(
        lambda x: jnp.asarray(np.asarray(x), jnp.float32),
        tree,
        is_leaf=lambda x: isinstance(x, linear.Rows),
    )
