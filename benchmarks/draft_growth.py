"""What drafting costs as blocks grow: one pass for DFlash, one a token for EAGLE.

Fresh drafters, for time does not depend on what they have learnt: DFlash with two layers
and EAGLE-3 with one, both over the same draft vocabulary, drafting chains. Milliseconds of
``propose`` and ``update`` (``jspec.measure.terms``), batch 1.

    python benchmarks/draft_growth.py --gamma 4 7 15
"""

import argparse

import jax
import numpy as np

import jspec
from jspec import measure, report
from jspec.compilation import enable_cache
from jspec.drafters import eagle, growth
from jspec.drafters.loading import block_draft
from jspec.train.block_starts import fresh_dflash, with_markov
from jspec.train.starts import fresh_eagle3


def drafts(model, gamma: int, vocab: int) -> dict[str, jspec.Draft]:
    """A DFlash, a DSpark and an EAGLE-3 drafter of ``gamma`` tokens."""
    depth, key = model.config.layers, jax.random.key(0)
    taps = (depth // 3, 2 * depth // 3, depth - 1)
    ids = np.arange(vocab, dtype=np.int32)
    mask = model.config.vocab_size - 1
    block = fresh_dflash(model, taps, ids, mask, key, block=gamma + 1)
    own = fresh_dflash(model, taps, ids, mask, key, block=gamma)
    spark = with_markov(own, key, 32)
    head = fresh_eagle3(model, taps, ids, key)
    chain = eagle.drafter(head.design, growth.chain(gamma), dtype=model.dtype)
    return {
        "DFlash": block_draft(block, "dflash", model),
        "DSpark": block_draft(spark, "dspark", model),
        "EAGLE-3 chain": jspec.Draft(chain, head.weights, "eagle3"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--gamma", type=int, nargs="+", default=[4, 7, 15])
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    enable_cache()
    model = jspec.load(args.target)
    prompt = list(range(5, 105))
    found: dict[str, list[float]] = {}
    for gamma in args.gamma:
        for name, draft in drafts(model, gamma, args.vocab).items():
            one = measure.terms(model, draft, [prompt], slots=256, runs=args.runs)
            found.setdefault(name, []).append(one.draft)
    out = report.console()
    out.print(f"T_draft in ms, gamma {' '.join(map(str, args.gamma))}, last over first")
    for name, times in found.items():
        each = " ".join(f"{t:7.2f}" for t in times)
        out.print(f"{name:14}{each}   {times[-1] / times[0]:.2f}")


if __name__ == "__main__":
    main()
