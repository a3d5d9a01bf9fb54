"""transformers' assisted generation and prompt lookup, as rows of the table of methods.

PyTorch on the very same weights, prompts and machine: plain decoding, prompt lookup, and
assisted generation with the first layers of the model itself (or --assistant, a folder or
Hub id) as assistant. Times leave out the prompt, as everywhere: one run of one new token is
subtracted. Lines go to --json, and compare.py puts those of its own target and prompts into
its table.

    python experiments/peers.py --limit 12 --json results.jsonl
    python experiments/compare.py --limit 12 --json results.jsonl
"""

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

import jspec
from jspec import bench, comparison, record, report
from jspec.compilation import enable_cache
from jspec.drafters import first_layers
from jspec.models import Model, load, save
from jspec.prompts import load_prompts
from jspec.text import encode

LAYERS = 3


def torch_model(model: Model | str, folder: Path, dtype: str) -> Any:
    """The same weights in transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    where = model if isinstance(model, str) else save(model, folder)
    made = AutoModelForCausalLM.from_pretrained(where, dtype=getattr(torch, dtype))
    made = made.eval()
    made.generation_config.pad_token_id = made.config.eos_token_id or 0
    return made


def options(assistant: Any) -> dict[str, dict]:
    """Arguments of ``generate`` for every method, by its name in the table."""
    return {
        "transformers plain": {},
        "transformers prompt lookup": {"prompt_lookup_num_tokens": 10},
        "transformers assisted": {"assistant_model": assistant},
    }


def generate(
    torch_model: Any, ids: list[int], new: int, eos: list[int], **more
) -> tuple:
    """New tokens, and the seconds they took."""
    import torch

    given = torch.tensor([ids])

    def run(count: int) -> tuple[list[int], float]:
        start = time.perf_counter()
        out = torch_model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=eos or None,
            **more,
        )
        return out[0, len(ids) :].tolist(), time.perf_counter() - start

    _, first = run(1)
    tokens, whole = run(new)
    return tokens, max(whole - first, 1e-9) * len(tokens) / max(len(tokens) - 1, 1)


def line(name: str, model: Model, found: dict, args, count: int) -> dict:
    """A method's record, with the fields that the table reads."""
    import torch

    tokens, seconds = sum(map(len, found["tokens"])), sum(found["seconds"])
    plain = sum(map(len, found["plain"])) / sum(found["plain_seconds"])
    rate = tokens / seconds
    return {
        "method": name,
        "family": "other library",
        "target": model.name,
        "topology": "chain" if name != "transformers plain" else "none",
        "temperature": args.temperature,
        "batch": 1,
        "prompts": len(found["tokens"]),
        "asked_prompts": count,
        "max_new_tokens": args.max_new_tokens,
        "new_tokens": tokens,
        "tau": None,
        "acceptance_by_depth": [],
        "tokens_per_s": rate,
        "ar_tokens_per_s": plain,
        "speedup": rate / plain,
        "uses_features": False,
        "lossless": found["tokens"] == found["plain"],
        "tasks": {},
        "device": record.device(),
        "dtype": model.dtype.name,
        "torch": torch.__version__,
        "jax": jax.__version__,
        "seed": args.seed,
        "commit": record.commit(),
    }


def run(args, say: Callable = print) -> list[dict]:
    """Runs all methods on every prompt, each against our own plain decoding, in turn."""
    if args.temperature != 0:
        raise ValueError("only greedy texts can be compared; leave --temperature at 0")
    questions = load_prompts(args.prompts, args.limit)
    model = load(args.target, dtype=args.dtype)
    prompts = encode(
        model.tokenizer, [q.prompt for q in questions], model.config.vocab_size
    )
    slots = -(-(max(map(len, prompts)) + args.max_new_tokens) // 64) * 64
    with tempfile.TemporaryDirectory() as folder, record.lines(args.json) as file:
        dtype = model.dtype.name
        theirs = torch_model(model, Path(folder) / "target", dtype)
        small = args.assistant or first_layers(model, LAYERS)
        every = options(torch_model(small, Path(folder) / "assistant", dtype))
        jspec.generate(model, None, prompts[0], max_new_tokens=2, slots=slots)
        keys = ("tokens", "seconds", "plain", "plain_seconds")
        found: dict[str, dict] = {name: {key: [] for key in keys} for name in every}
        for i, ids in enumerate(prompts):
            say(f"prompt {i + 1} of {len(prompts)}")
            plain = jspec.generate(
                model, None, ids, max_new_tokens=args.max_new_tokens, slots=slots
            )
            for name, more in every.items():
                tokens, seconds = generate(
                    theirs, ids, args.max_new_tokens, list(model.config.eos_ids), **more
                )
                found[name]["tokens"].append(tokens)
                found[name]["seconds"].append(seconds)
                found[name]["plain"].append(plain.tokens[0])
                found[name]["plain_seconds"].append(plain.stats.seconds)
        lines = [line(n, model, f, args, len(questions)) for n, f in found.items()]
        for one in lines:
            record.append(file, one)
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench.argument_parser(__doc__, {"drafter": "transformers"})
    parser.add_argument("--assistant", metavar="MODEL", help="transformers assistant")
    args = parser.parse_args(argv)
    if args.smoke:
        args.limit, args.max_new_tokens = 2, min(args.max_new_tokens, 16)
    with bench.one_line_errors() as status:
        enable_cache()
        say = report.console(error=True).print
        report.console().print(comparison.table(run(args, say)))
    return status.code


if __name__ == "__main__":
    sys.exit(main())
