"""What sampling and accepting cost on a TPU that is not there, beside the target's forward.

A fused kernel would read the logits and the draft's law once or twice and write nothing of
their size. The table says what the program moves as it is, and how much of a round a
kernel without any cost would save. Options are constants, so that XLA does not count
penalties and truncations that nobody asked for. Needs libtpu.

  python benchmarks/accept_cost.py --chip v5e --batches 1,8,32
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from rich.table import Table

from jspec import options, report, roofline, topology, tree, verify
from jspec import sampling as smp
from jspec.closed_form import arithmetic
from jspec.compiled import cost_of
from jspec.models.config import Config
from jspec.models.presets import preset
from jspec.phases import Phase, Setting
from jspec.types import Law, chain

RULES = {"greedy": False, "walk": False, "block": True}  # is the draft's law dense?


def accept(config: Config, name: str, batch: int, nodes: int) -> Phase:
    """The accept phase of chains: law, noise and rule."""
    vocab = config.vocab_size
    temperature = 0.0 if name == "greedy" else 1.0
    knobs = options.options(
        batch, temperature=temperature, vocab_size=vocab, eos_ids=config.eos_ids
    )

    def call(token, q, logits, tokens, length, start, round):
        block = chain(token, law=Law(q))
        mask = tree.ancestors(block.parent)
        law = smp.law(logits, knobs, tokens, length, start, block, mask)
        _, key = smp.row_keys(knobs, round)
        noise = smp.noise(key, knobs, length, nodes, nodes, vocab)
        return verify.batched(verify.LOSSLESS[name])(noise, block, law)

    def shape(*sizes, of=jnp.int32):
        return jax.ShapeDtypeStruct(sizes, of)

    wide = shape(batch, nodes, vocab, of=jnp.float32)
    row = shape(batch)
    q = wide if RULES[name] else None
    text = shape(batch, 2048)
    return Phase(call, (shape(batch, nodes), q, wide, text, row, row, row))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--target", default="llama-3.1-8b")
    add("--chip", default="v5e", choices=sorted(topology.TPUS))
    add("--batches", default="1,8,32", metavar="N,N")
    add("--gamma", type=int, default=4)
    args = parser.parse_args()
    config, chip = preset(args.target), roofline.CHIPS[args.chip]
    mesh = topology.tpu_mesh(args.chip)
    table = Table(
        title=f"{args.target} on {chip.name}, chain of {args.gamma}, 2,048 cached",
        caption="over logits: bytes moved over one read of the logits. score: the bound. "
        "share: of both together, so what a kernel without cost would save",
    )
    for name in ("rule", "batch", "MB", "over logits", "XLA ms", "score ms", "share"):
        table.add_column(name, justify="right")
    nodes = args.gamma + 1
    setting = Setting(nodes, args.gamma)
    for batch in map(int, args.batches.split(",")):
        score = arithmetic(config, "ngram", setting, batch, 2048, 1)["score"].bound(
            chip
        )
        for rule in RULES:
            cost = cost_of(accept(config, rule, batch, nodes), mesh)
            logits = 4.0 * batch * nodes * config.vocab_size
            seconds = cost.seconds or cost.bound(chip)
            table.add_row(
                rule,
                str(batch),
                f"{cost.moved / 1e6:.0f}",
                f"{cost.moved / logits:.1f}",
                f"{1e3 * seconds:.2f}",
                f"{1e3 * score:.1f}",
                f"{seconds / (seconds + score):.1%}",
            )
    report.console().print(table)


if __name__ == "__main__":
    main()
