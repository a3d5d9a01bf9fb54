"""jspec against transformers on the same weights, prompts and machine, in turn.

Two comparisons, greedy and in the same precision: plain decoding against ``generate``, and prompt
lookup against ``generate(prompt_lookup_num_tokens=10)``. Every prompt is decoded by all
methods one after the other, so that all of them meet the same machine; medians over the
prompts are quoted. Needs torch (the ``test`` extra).

    python benchmarks/versus_transformers.py
    python benchmarks/versus_transformers.py --dtype bfloat16 --shortest 1
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time

import jax
import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jspec
from jspec import drafters, measure
from jspec.arguments import add_target
from jspec.compilation import enable_cache
from jspec.prompts import load_prompts
from jspec.text import encode

LOOKUP_CATEGORIES = ("summarization", "code")
CONTEXT = 512
STRIDE = 64


def main() -> None:
    args = _arguments()
    enable_cache()
    model = jspec.load(args.target, dtype=args.dtype)
    theirs = _in_transformers(model)
    prompts = load_prompts(args.prompts, args.limit)
    ngram = drafters.ngram(gamma=args.gamma, shortest=args.shortest)
    hf = {"prompt_lookup_num_tokens": 10}
    vocab_size = model.target.config.vocab_size
    encoded = encode(model.tokenizer, [q.prompt for q in prompts], vocab_size)
    encoded = [ids[: CONTEXT - args.max_new_tokens] for ids in encoded]
    for drafter, extra in ((None, {}), (ngram, hf)):  # compile and warm up
        for ids in encoded:  # prompts of other lengths have programs of their own
            slots = _slots(ids, args)
            jspec.generate(model, drafter, [ids], max_new_tokens=1, slots=slots)
        _both(model, theirs, drafter, extra, [1, 2, 3], args)
    plain, lookup = [], []
    pairs = list(zip(prompts, encoded, strict=True))
    for question, ids in track(pairs, "decoding in turn"):
        plain.append(_both(model, theirs, None, {}, ids, args))
        if question.category in LOOKUP_CATEGORIES:
            lookup.append(_both(model, theirs, ngram, hf, ids, args) + plain[-1])
    _report(model, plain, lookup, args)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_target(parser)
    parser.add_argument("--prompts", help="JSON lines; default: the packaged set")
    parser.add_argument("--limit", type=int, help="prompts to use; default: all")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--gamma", type=int, default=7, help="jspec's longest draft")
    parser.add_argument(
        "--shortest",
        type=int,
        default=3,
        help="n-gram that jspec looks up, in tokens; 1 pays where a block costs hardly "
        "more than a token (3)",
    )
    parser.add_argument("--json", help="append the result to this file")
    return parser.parse_args()


def _in_transformers(model: jspec.Model):
    with tempfile.TemporaryDirectory() as folder:
        jspec.save(model, folder)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, model.dtype.name)
        )
    theirs.generation_config.pad_token_id = 0
    return theirs.eval()


def _both(model, theirs, drafter, hf: dict, ids: list[int], args):
    """(ours, theirs) in tokens per second, prefill included in both."""
    new, slots = args.max_new_tokens, _slots(ids, args)
    ours = _speed(
        lambda: jspec.generate(
            model, drafter, [ids], max_new_tokens=new, slots=slots
        ).tokens[0]
    )
    prompt = torch.tensor([ids])

    def generate():
        with torch.no_grad():
            out = theirs.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=args.max_new_tokens,
                eos_token_id=list(model.target.config.eos_ids),
                **hf,
            )
        return out[0, len(ids) :].tolist()

    return ours, _speed(generate)


def _slots(ids: list[int], args) -> int:
    """Room for the prompt and its answer, in few sizes, so that prompts share programs."""
    return -(-(len(ids) + args.max_new_tokens) // STRIDE) * STRIDE


def _speed(run) -> float:
    """Tokens per second of ``run() -> tokens``."""
    start = time.perf_counter()
    tokens = run()
    return len(tokens) / (time.perf_counter() - start)


def _report(model, plain, lookup, args) -> None:
    bandwidth = measure.copy_bandwidth()
    weights = sum(x.nbytes for x in jax.tree.leaves(model.params)) / 1e9
    rows = {
        "plain": _line(plain),
        "prompt lookup": _line([p[:2] for p in lookup]),
        "lookup over our plain": _line([(p[0], p[2]) for p in lookup]),
    }
    table = Table(
        title=f"{model.name}, {model.dtype.name}, {args.max_new_tokens} new tokens"
    )
    for column in ("", "jspec tok/s", "transformers tok/s", "ratio (median)"):
        table.add_column(column, justify="right")
    for name, (ours, hf, ratio) in rows.items():
        table.add_row(name, f"{ours:.1f}", f"{hf:.1f}", f"{ratio:.2f}")
    console = Console()
    console.print(table)
    share = rows["plain"][0] * weights / bandwidth
    console.print(
        f"Plain decoding reads {weights:.2f} GB of weights a token: "
        f"{100 * share:.0f}% of the measured {bandwidth:.1f} GB/s, prefill included."
    )
    if args.json:
        result = {k: list(v) for k, v in rows.items()}
        record = {**result, "bandwidth_gb_s": bandwidth, "bandwidth_share": share}
        with open(args.json, "a", encoding="utf-8") as file:
            file.write(json.dumps({**record, **vars(args)}) + "\n")


def _line(pairs) -> tuple[float, float, float]:
    ours, theirs = zip(*pairs, strict=True)
    ratio = statistics.median(a / b for a, b in pairs)
    return statistics.median(ours), statistics.median(theirs), ratio


if __name__ == "__main__":
    main()
