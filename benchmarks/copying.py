"""What drafters that copy cost: milliseconds a draft against the length of the context.

The text is random over few tokens, so that n-grams recur all the time, which is the dear
case: a drafter that finds nothing is never slower. --store adds the search in a store of so
many random tokens; building it is timed too.

    python benchmarks/copying.py --contexts 512 4096 32768 --store 10000000
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jspec import timing
from jspec.drafters import ngram, ngram_tree, rest, store, suffix, suffix_tree
from jspec.drafters.store import Store
from jspec.timing import Loop
from jspec.types import Context, Drafter

DRAFTERS: dict[str, Drafter] = {
    "ngram": ngram(),
    "ngram tree": ngram_tree(),
    "suffix": suffix(8),
    "suffix tree": suffix(8, 12, suffix_tree),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--contexts", type=int, nargs="+", default=[512, 4096, 32768], metavar="T")
    add("--tokens", type=int, default=300, help="different tokens in the text (300)")
    add("--store", type=int, metavar="N", help="search a store of N tokens as well")
    args = parser.parse_args()
    random = np.random.default_rng(0)
    programs = {}
    for length in args.contexts:
        text = random.integers(args.tokens, size=length)
        for name, drafter in DRAFTERS.items():
            programs[name, length] = _loop(drafter, None, text)
    if args.store:
        texts = _built(random.integers(args.tokens, size=args.store))
        text = random.integers(args.tokens, size=args.contexts[0])
        programs["rest", args.contexts[0]] = _loop(rest(), texts, text)
        both = suffix(8, stored=True)
        programs["suffix and store", args.contexts[0]] = _loop(both, texts, text)
    found = timing.in_turn(programs, repetitions=50, runs=7)
    table = Table(title="milliseconds a draft")
    for column in ("drafter", *map(str, args.contexts)):
        table.add_column(column, justify="right")
    for name in dict.fromkeys(name for name, _ in programs):
        cells = [found.get((name, length)) for length in args.contexts]
        table.add_row(name, *("-" if x is None else f"{x:.3f}" for x in cells))
    Console().print(table)


def _built(tokens: np.ndarray) -> Store:
    start = time.perf_counter()
    made = store.build([tokens]).on_device()
    print(
        f"a store of {len(tokens)} tokens was built in {time.perf_counter() - start:.1f} s"
    )
    return made


def _loop(drafter: Drafter, params, text: np.ndarray) -> Callable[[int], None]:
    """A function that drafts so many times, each time for another end of the text."""
    given = params, jnp.asarray(text[None], jnp.int32)
    loop = Loop(_draft, (drafter,), jnp.array([text.size]))
    return lambda repetitions: loop.run(given, repetitions)


def _draft(drafter: Drafter, given, length, zero):
    params, tokens = given
    tokens = timing.depending(tokens, zero)
    context = Context(tokens, length + zero, None)
    key = jax.random.split(jax.random.key(0), 1)
    block, _ = drafter.propose(params, None, key, context)
    size = tokens.shape[1]
    return jnp.where(length > size - size // 4, length - 1, size), (
        block.token,
        block.live,
    )


if __name__ == "__main__":
    main()
