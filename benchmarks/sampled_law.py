"""Does speculation sample what the target would? Counted on a real model.

The law of the first two tokens after a prompt is enumerated (top-k sampling, so that it can
be: the first token's law from one row of logits, the second's from a tree of all first
tokens, scored in one forward). Then each method samples continuations, and a chi-square
test says how likely counts as far from the law are if the method is exact: below 0.001 is a
defect, values between 0 and 1 are equally likely otherwise.

    python benchmarks/sampled_law.py --methods ngram checkpoints/eagle3-smollm2-135m
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.stats import chisquare

import jspec
from jspec import bench
from jspec.arguments import add_target
from jspec.compilation import enable_cache
from jspec.text import encode
from jspec.types import Block

PROMPT = "Name a colour, then an animal of that colour, then a colour again."
BINS = 12  # the most probable tokens; all others are counted together


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add_target(parser)
    add("--methods", nargs="+", default=["none", "ngram"], help="as for --drafter")
    add("--prompt", default=PROMPT)
    add("--samples", type=int, default=1000, help="continuations a method (1000)")
    add("--batch", type=int, default=50, help="continuations at once (50)")
    add("--top-k", type=int, default=64, help="tokens that may be sampled (64)")
    add("--gamma", type=int, help="draft chains of so many; else the method's own")
    args = parser.parse_args()
    enable_cache()
    model = jspec.load(args.target, dtype=args.dtype)
    ids = encode(model.tokenizer, [args.prompt], model.config.vocab_size)[0]
    laws = _laws(model, ids, args.top_k)
    table = Table(title=f"{args.samples} samples at temperature 1, top-k {args.top_k}")
    for column in ("method", "tau", "first token: p-value", "second token: p-value"):
        table.add_column(column, justify="right")
    for name in args.methods:
        one = bench.method(name, model, None, args.gamma)
        drawn, tau = _draw(model, one.draft, ids, args)
        values = [_p_value(law, drawn[:, i]) for i, law in enumerate(laws)]
        table.add_row(one.name, f"{tau:.2f}", *(f"{p:.3f}" for p in values))
    Console().print(table)


def _laws(model, ids: list[int], top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """The laws ``[V]`` of the first and the second token, float64."""
    cache = model.target.init_cache(1, 1, model.cache_dtype)
    first = _law(_last_logits(model, cache, jspec.chain(jnp.array([ids])), -1), top_k)
    tokens = np.flatnonzero(first)
    nodes = len(ids) + len(tokens)
    block = Block(  # the prompt as a chain, every first token below its end
        token=jnp.array([[*ids, *tokens]], jnp.int32),
        parent=jnp.array([[*range(-1, len(ids) - 1), *[len(ids) - 1] * len(tokens)]]),
        live=jnp.ones((1, nodes), bool),
        vote=jnp.ones((1, nodes), bool),
    )
    rows = _last_logits(model, cache, block, slice(len(ids), None))
    each = [_law(row, top_k) for row in rows]
    return first, first[tokens] @ np.array(each)


def _last_logits(model, cache, block, rows) -> np.ndarray:
    score = jax.jit(lambda params, block: model.target.score(params, cache, block))
    return np.asarray(score(model.params, block).logits[0], np.float64)[rows]


def _law(logits: np.ndarray, top_k: int) -> np.ndarray:
    law = np.where(logits >= np.sort(logits)[-top_k], np.exp(logits - logits.max()), 0)
    return law / law.sum()


def _draw(model, draft, ids: list[int], args) -> tuple[np.ndarray, float]:
    """First two tokens ``[samples, 2]`` of continuations, and tau of all rounds."""
    found, tokens, rounds = [], 0, 0
    for start in track(range(0, args.samples, args.batch), "sampling", transient=True):
        out = jspec.generate(
            model,
            draft,
            [ids] * args.batch,
            max_new_tokens=6,
            temperature=1.0,
            top_k=args.top_k,
            seed=list(range(start, start + args.batch)),
            eos_ids=(),
        )
        found += [row[:2] for row in out.tokens]
        tokens, rounds = tokens + out.stats.new_tokens, rounds + out.stats.rounds
    return np.array(found), tokens / rounds


def _p_value(law: np.ndarray, drawn: np.ndarray) -> float:
    best = np.argsort(-law)[:BINS]
    counts = np.array([np.sum(drawn == token) for token in best])
    counts = np.append(counts, len(drawn) - counts.sum())
    share = np.append(law[best], 1 - law[best].sum())
    kept = share * len(drawn) >= 5  # smaller bins are joined
    counts = np.append(counts[kept], counts[~kept].sum())
    share = np.append(share[kept], share[~kept].sum())
    some = share > 1e-9
    return float(chisquare(counts[some], share[some] * len(drawn)).pvalue)


if __name__ == "__main__":
    main()
