"""One training run from names to a finished head: what ``jspec train`` does."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from jspec import checks
from jspec.models import Model, load
from jspec.train import corpus, features, packing, parallel
from jspec.train.feature_cache import cache_features, stored_taps
from jspec.train.fit import fit
from jspec.train.packing import Rows
from jspec.train.recipes import RECIPES, Recipe

PRODUCTS = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Options:
    """How a head is trained.

    Attributes:
      steps: updates in all.  length: tokens a row.
      batch: rows an update, split over as many devices as divide it.
      lr: peak learning rate; warms up over ``warmup`` steps, then falls to a twentieth
        along a cosine.  clip: of the gradient's norm.
      every: steps between evaluations and checkpoints.
      held: rows that are held out for evaluation.
      rows: most rows to learn from; None is all that the corpus fills.
      cache: folder that the target's features are written to once, for many epochs and
        several methods; None computes them anew for every batch.
      products: precision of large products, "float32" or "bfloat16" (sums, weights and
        their gradients stay in float32).
      recipe: further arguments of the method's recipe.
    """

    steps: int = 2000
    batch: int = 2
    length: int = 512
    lr: float = 1e-3
    warmup: int = 30
    clip: float = 0.5
    every: int = 200
    held: int = 16
    rows: int | None = None
    seed: int = 0
    cache: str | None = None
    products: str = "float32"
    recipe: dict[str, Any] = dataclasses.field(default_factory=dict)


def train(
    method: str,
    target: str | Model,
    corpora: Sequence[str | Path],
    out: str | Path,
    options: Options | None = None,
    say: Callable[[str], None] = print,
) -> Path:
    """Trains a head, or goes on with the run in ``out``; returns the head's folder.

    Args:
      method: a name of ``recipes.RECIPES``.
      target: the model the head is for.
      corpora: files of self-generated conversations.
      out: folder of the run; the head comes to ``out/head``.
      options: see there.
      say: told what is going on.

    Raises:
      ValueError: an unknown method, a corpus of another tokenizer, settings out of range
        or other than those of the run in ``out``.
      OSError: a file cannot be read or written.
    """
    if method not in RECIPES:
        raise ValueError(
            f"method {method!r} is not one of {', '.join(sorted(RECIPES))}"
        )
    options, out = options or Options(), Path(out)
    if options.products not in PRODUCTS:
        raise ValueError(
            f"products {options.products!r} is not one of {', '.join(PRODUCTS)}"
        )
    model = load(target) if isinstance(target, str) else target
    learn, held = corpus.split(corpus.read(corpora, model.tokenizer))
    say(f"{len(learn.documents)} conversations, {learn.tokens} tokens to learn from")
    recipe = RECIPES[method](model, learn, seed=options.seed, **options.recipe)
    rows = packing.rows(learn, options.length)
    if options.rows is not None:
        checks.count("rows", options.rows, options.batch)
    with jax.default_matmul_precision(options.products):
        params = fit(
            recipe.loss,
            recipe.params,
            _data(model, rows, recipe, options, say),
            steps=options.steps,
            optimizer=optimizer(options),
            out=out,
            every=options.every,
            evaluate=_evaluation(model, held, recipe, out / "head", options),
            seed=options.seed,
            mesh=parallel.data_mesh(math.gcd(options.batch, jax.device_count())),
        )
    return recipe.save(params, out / "head")


def optimizer(options: Options) -> optax.GradientTransformation:
    """AdamW without decay, betas 0.9 and 0.95 as EAGLE's, clipped, on a cosine."""
    warmup = min(options.warmup, options.steps // 2)
    rate = optax.warmup_cosine_decay_schedule(
        0.0, options.lr, warmup, max(options.steps, warmup + 1), options.lr / 20
    )
    return optax.chain(
        optax.clip_by_global_norm(options.clip),
        optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.0),
    )


def _data(model: Model, rows: Rows, recipe: Recipe, options: Options, say):
    if options.cache is None:
        rows = rows.take(np.arange(len(rows))[: options.rows])
        return features.stream(
            model.params,
            packing.batches(rows, options.batch, options.seed),
            target=model.target,
            taps=recipe.taps,
            dtype=model.cache_dtype,
        )
    say(f"features are kept in {options.cache}")
    cached = cache_features(
        options.cache,
        rows,
        model.params,
        target=model.target,
        taps=stored_taps(options.cache, recipe.taps),
        limit=options.rows,
        progress=lambda done, count: say(f"features: {done} of {count} rows"),
    )
    return cached.batches(rows, options.batch, options.seed, recipe.taps, options.rows)


def _evaluation(model: Model, held, recipe: Recipe, head: Path, options: Options):
    """``params -> metrics`` averaged over the held-out rows, whose features are kept.

    Saves the head as well, so that what a checkpoint holds can be tried at once.
    """
    rows = packing.rows(held, options.length)
    size = min(options.batch, options.held, len(rows))
    count = min(options.held, len(rows)) // size * size
    data = features.stream(
        model.params,
        lambda i: rows.take(np.arange(i, i + size)),
        target=model.target,
        taps=recipe.taps,
        dtype=model.cache_dtype,
    )
    batches: list[Rows] = []
    key = jax.random.key(0)
    loss = jax.jit(lambda loss, params, batch: loss(params, batch, key))

    def evaluate(params) -> dict[str, Any]:
        recipe.save(params, head)
        if not batches:
            batches.extend(data(i) for i in range(0, count, size))
        found = []
        for batch in batches:
            value, metrics = loss(recipe.loss, params, batch)
            found.append(jax.device_get({**metrics, "loss": value}))
        return {name: np.mean([f[name] for f in found], axis=0) for name in found[0]}

    return evaluate
