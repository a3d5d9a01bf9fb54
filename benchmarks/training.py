"""Training speed of an EAGLE-3 head, with large products in float32 and in bfloat16.

Seconds of the target's features, and of the loss with its gradients, for one update of two
rows of 512 tokens; medians, and tokens a second with features computed anew and cached.

    python benchmarks/training.py --corpus corpus.npz
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
from rich.console import Console
from rich.table import Table

import jspec
from jspec.train import corpus, features, packing
from jspec.train.recipes import RECIPES
from jspec.train.run import PRODUCTS

ROWS, LENGTH = 2, 512


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", default="smollm2-135m", help="a model to load")
    parser.add_argument("--corpus", nargs="+", required=True, help="files, .npz")
    parser.add_argument("--runs", type=int, default=5, help="of each (5)")
    args = parser.parse_args()
    model = jspec.load(args.target, dtype="float32")
    learn, _ = corpus.split(corpus.read(args.corpus, model.tokenizer))
    recipe = RECIPES["eagle3"](model, learn)
    data = packing.batches(packing.rows(learn, LENGTH), ROWS, 0)
    table = Table(title=f"EAGLE-3 for {model.name}, {ROWS * LENGTH} tokens an update")
    for name in ("products", "features s", "gradients s", "tokens/s", "cached"):
        table.add_column(name)
    for products in PRODUCTS:
        with jax.default_matmul_precision(products):
            read, learnt = _seconds(model, recipe, data, args.runs)
        speeds = (ROWS * LENGTH / s for s in (read + learnt, learnt))
        times = (f"{s:.2f}" for s in (read, learnt))
        table.add_row(products, *times, *(f"{s:.0f}" for s in speeds))
    Console().print(table)


def _seconds(model: jspec.Model, recipe, data, runs: int) -> tuple[float, float]:
    """Of features and of gradients, without compilation."""
    stream = features.stream(
        model.params, data, target=model.target, taps=recipe.taps, dtype=model.dtype
    )

    @jax.jit
    def gradients(loss, params, batch):
        key = jax.random.key(0)
        return jax.value_and_grad(lambda p: loss(p, batch, key), has_aux=True)(params)

    batch = stream(0)
    read = _median(lambda: stream(0), runs)
    return read, _median(lambda: gradients(recipe.loss, recipe.params, batch), runs)


def _median(call, runs: int) -> float:
    jax.block_until_ready(call())
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    main()
