"""What drafting costs as blocks grow: one pass for DFlash, one a token for EAGLE.

Fresh drafters, for time does not depend on what they have learnt: DFlash with two layers
and EAGLE-3 with one, both over the same draft vocabulary, drafting chains after 100 tokens of
which one is new. Milliseconds of ``propose`` and ``update``, batch 1, greedy: point masses.

    python benchmarks/draft_growth.py --gamma 4 7 15
"""

import argparse
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import jspec
from jspec import report, sampling, timing
from jspec.arguments import add_target
from jspec.compilation import enable_cache
from jspec.drafters import eagle, growth
from jspec.drafters.loading import block_draft
from jspec.train.block_starts import fresh_dflash, with_markov
from jspec.train.starts import fresh_eagle3
from jspec.types import Feedback, Verdict

TEXT = 100  # tokens before the block


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
    chain = eagle.drafter(
        head.design, growth.chain(gamma, dense=False), dtype=model.cache_dtype
    )
    return {
        "DFlash": block_draft(block, "dflash", model, dense=False),
        "DSpark": block_draft(spark, "dspark", model, dense=False),
        "EAGLE-3 chain": jspec.Draft(chain, head.weights, "eagle3"),
    }


def loop(model, draft: jspec.Draft):
    """The drafter's share of a round, ready to be run so many times."""
    drafter = draft.drafter
    width = len(drafter.shape.taps) * model.config.hidden
    size = model.config.vocab_size
    options = sampling.options(1, vocab_size=size, eos_ids=(), temperature=0.0)
    text = jnp.arange(5, 5 + TEXT)[None]
    features = jax.random.normal(jax.random.key(1), (1, TEXT, width))
    given = jspec.Context(text, jnp.array([TEXT]), options, features)
    state = jax.jit(drafter.init)(draft.params, given)
    arguments = draft.params, options, text, features[:, : drafter.shape.nodes]
    one = timing.Loop(_step, (drafter,), state)
    return functools.partial(one.run, arguments)


def _step(drafter, given, state, zero):
    params, *inputs = given
    options, text, features = timing.depending(inputs, zero)
    state = timing.depending(state, zero, timing.SMALL)
    context = jspec.Context(text, jnp.array([TEXT]), options)
    key = jax.random.split(jax.random.key(2), 1)
    block, drafted = drafter.propose(params, state, key, context)
    path = jnp.where(jnp.arange(drafter.shape.depth + 1) == 0, 0, -1)[None]
    verdict = Verdict(path, jnp.array([0]), jnp.array([7]))
    told = Feedback(block, verdict, jnp.zeros(()), features, options)
    new = drafter.update(params, drafted, told)
    cache = new.cache.rewind(state.cache.length)
    out = getattr(new, "out", None)  # what EAGLE drafts from
    kept = dataclasses.replace(state, cache=cache)
    return kept, (block.token, new.cache.length, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_target(parser)
    parser.add_argument("--gamma", type=int, nargs="+", default=[4, 7, 15])
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    enable_cache()
    model = jspec.load(args.target, dtype=args.dtype)
    loops = {
        (name, gamma): loop(model, draft)
        for gamma in args.gamma
        for name, draft in drafts(model, gamma, args.vocab).items()
    }
    times = timing.in_turn(loops, 32, args.runs)
    found: dict[str, list[float]] = {}
    for (name, _), time in times.items():
        found.setdefault(name, []).append(time)
    out = report.console()
    out.print(f"T_draft in ms, gamma {' '.join(map(str, args.gamma))}, last over first")
    for name, times in found.items():
        each = " ".join(f"{t:7.2f}" for t in times)
        out.print(f"{name:14}{each}   {times[-1] / times[0]:.2f}")


if __name__ == "__main__":
    main()
