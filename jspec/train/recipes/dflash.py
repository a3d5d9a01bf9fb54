"""Recipes of block-diffusion drafters: DFlash, DFlash-2 and DSpark."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np

from jspec.drafters import dspark as heads
from jspec.drafters.diffusion import Weights
from jspec.drafters.published_dflash import BlockHead, save_dflash
from jspec.drafters.tensors import target_head
from jspec.models import Model
from jspec.train import block_losses as losses
from jspec.train.block_starts import fresh_dflash, with_markov, with_selector
from jspec.train.corpus import Corpus
from jspec.train.dflash import aims, random_anchors, rate, texts
from jspec.train.packing import Rows
from jspec.train.recipes.recipe import Recipe, draft_ids, frozen
from jspec.types import Array


def dflash(
    target: Model,
    corpus: Corpus,
    *,
    taps: tuple[int, ...] | None = None,
    layers: int = 2,
    block: int = 8,
    draft_vocab: int = 8192,
    anchors: int = 64,
    gamma: float = 4.0,
    alpha: float | None = None,
    start: BlockHead | None = None,
    seed: int = 0,
) -> Recipe:
    """DFlash: cross-entropy of the text's tokens, less for later rows.

    Args:
      target: gives embedding, head and starting weights.
      corpus: gives the draft vocabulary and a mask token.
      taps: features to read; by default those after a third and two thirds of the
        layers and after all but one.
      layers, block: of the drafter; ``block`` counts the anchor's row.
      draft_vocab: ids that are drafted; all, if the target has fewer.
      anchors: blocks of a row of the corpus, drawn anew every step.
      gamma: of the decay, see ``block_losses.decay``.
      alpha: if given, of D-PACE weights, which take the decay's place.
      start: a drafter to go on from; its own design and vocabulary are kept.
      seed: of the weights that have no better start.
    """
    if start is None:
        start = _fresh(target, corpus, taps, layers, block, draft_vocab, seed)
    return _plain(target, start, anchors, gamma, alpha)


def dflash2(
    target: Model,
    corpus: Corpus,
    *,
    taps: tuple[int, ...] | None = None,
    layers: int = 2,
    block: int = 8,
    rank: int = 64,
    anchors: int = 64,
    gamma: float = 4.0,
    alpha: float | None = None,
    start: BlockHead | None = None,
    seed: int = 0,
) -> Recipe:
    """DFlash-2: the loss of DFlash and that of the selector over each row's candidates.

    Arguments as for ``dflash``; ``rank`` is the selector's. It drafts all ids, as its
    published layouts have it.
    """
    if start is None:
        whole = target.config.vocab_size
        start = _fresh(target, corpus, taps, layers, block, whole, seed)
        start = with_selector(start, jax.random.key(seed + 1), rank)
    return _plain(target, start, anchors, gamma, alpha)


def dspark(
    target: Model,
    corpus: Corpus,
    *,
    taps: tuple[int, ...] | None = None,
    layers: int = 2,
    block: int = 7,
    draft_vocab: int = 8192,
    rank: int = 32,
    link: str = "vanilla",
    anchors: int = 64,
    gamma: float = 4.0,
    start: BlockHead | None = None,
    seed: int = 0,
) -> Recipe:
    """DSpark: cross-entropy, chance of rejection and confidence, see ``losses.spark``.

    The target's law is taken over the draft vocabulary, as the speculators library does.
    Arguments as for ``dflash``; all rows of ``block`` guess.

    Args:
      rank, link: of the Markov head; ``vanilla``, ``gated`` or ``rnn``.

    Raises:
      ValueError: another ``link``.
    """
    if link not in heads.LINKS:
        raise ValueError(f"link {link!r} is not one of {', '.join(heads.LINKS)}")
    if start is None:
        start = _fresh(target, corpus, taps, layers, block, draft_vocab, seed)
        key = jax.random.key(seed + 1)
        start = with_markov(start, key, rank, heads.LINKS[link])
    design = start.design

    def loss(weights: Weights, teacher: Array, rows: Rows, key: Array):
        given = texts(rows)
        blocks = random_anchors(key, given, anchors)
        aim = aims(design, weights, given, blocks)
        rated = rate(
            design, weights, given, blocks, aim, last=rows.hidden, teacher=teacher
        )
        aim = aim._replace(valid=losses.unbroken(aim.valid))
        weight = aim.valid * losses.decay(design, gamma)
        found = losses.spark(rated, weight, aim.valid)
        return found, losses.seen(design, rated, aim)

    return _frozen(target, start, loss)


def _plain(target: Model, start: BlockHead, anchors: int, gamma: float, alpha):
    """The recipe of cross-entropy, with or without a selector."""
    design = start.design

    def loss(weights: Weights, teacher: Array, rows: Rows, key: Array):
        del teacher
        given = texts(rows)
        blocks = random_anchors(key, given, anchors)
        aim = aims(design, weights, given, blocks)
        rated = rate(design, weights, given, blocks, aim)
        weight = aim.valid * losses.decay(design, gamma)
        if alpha is not None:
            weight = losses.dpace(rated, aim.valid, alpha)
        found = losses.cross_entropy(rated, weight, aim.valid)
        if rated.choice is not None and rated.among is not None:
            inside = weight * rated.among
            found += losses.over_weights(rated.choice, inside, aim.valid)
        return found, losses.seen(design, rated, aim)

    return _frozen(target, start, loss)


def _frozen(target: Model, start: BlockHead, loss) -> Recipe:
    """What a drafter shares with its target stays as it is."""
    weights = start.weights
    ids = weights.to_target

    def save(weights: Weights, folder: Path) -> Path:
        return save_dflash(dataclasses.replace(start, weights=weights), folder)

    return frozen(
        weights,
        {"embed": weights.embed, "head": weights.head, "to_target": ids},
        loss,
        save,
        teacher=target_head(target, None if ids is None else np.asarray(ids)),
        taps=start.design.taps,
    )


def _fresh(
    target: Model, corpus: Corpus, taps, layers: int, block: int, vocab: int, seed: int
) -> BlockHead:
    depth, size = target.config.layers, target.config.vocab_size
    taps = taps or tuple(sorted({depth // 3, 2 * depth // 3, depth - 1}))
    return fresh_dflash(
        target,
        taps,
        draft_ids(corpus, vocab, size),
        mask_token(target, corpus),
        jax.random.key(seed),
        layers=layers,
        block=block,
    )


def mask_token(target: Model, corpus: Corpus) -> int:
    """The tokenizer's mask token, or the first id that the corpus never has.

    Raises:
      ValueError: the corpus has all ids.
    """
    own = getattr(target.tokenizer, "mask_token_id", None)
    if own is not None:
        return int(own)
    size = target.config.vocab_size
    used = np.zeros(size, bool)
    for tokens, _ in corpus.documents:
        used[tokens] = True
    used[list(target.config.eos_ids)] = True
    free = np.flatnonzero(~used)
    if not len(free):
        raise ValueError(
            f"the corpus has all {size} tokens of {target.name}, and its tokenizer names "
            "no mask token; add one to it that texts do not have"
        )
    return int(free[0])
