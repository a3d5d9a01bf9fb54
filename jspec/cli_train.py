"""``jspec train`` and ``jspec inspect``."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax

from jspec import tree
from jspec.drafters import growth, load_drafter
from jspec.drafters.eagle import Design, Weights
from jspec.drafters.heads import Medusa
from jspec.drafters.published_eagle import load_eagle
from jspec.drafters.published_medusa import is_medusa, load_medusa
from jspec.drafters.published_mtp import is_mtp, load_mtp
from jspec.drafters.tensors import read_config
from jspec.generation import generate
from jspec.models import Model, load
from jspec.prompts import load_prompts
from jspec.text import encode

TRAIN = """Trains a head for a target on text that the target wrote itself.

  jspec train eagle3 --target smollm2-135m --corpus corpus.npz --out runs/eagle3
  jspec train eagle3 --target smollm2-135m --corpus corpus.npz --out runs/try --smoke

Killed or interrupted, the same command goes on where it was. The head is in OUT/head, in
the layout that others publish, and drafts with --draft OUT/head.
"""

INSPECT = """Shows what a published head was understood to be, and whether it guesses right.

  jspec inspect runs/eagle3/head --target smollm2-135m

The share of first guesses that are right is about 0.7 to 0.8 for a good head on text like
that it was trained on; 0.1 to 0.3 hints at a wrong norm, residual or layer.
"""

_SMOKE = {"steps": 6, "every": 3, "held": 4, "warmup": 2}


def add_train(command: argparse.ArgumentParser) -> None:
    """Options of ``jspec train``."""
    command.set_defaults(run=_train)
    add = command.add_argument
    add("method", metavar="METHOD", help="eagle1 (EAGLE-2's too), eagle3, medusa, mtp")
    add("--target", default="smollm2-135m", metavar="MODEL", help="(smollm2-135m)")
    add(
        "--corpus", nargs="+", required=True, metavar="FILE", help="conversations, .npz"
    )
    add("--out", required=True, metavar="FOLDER", help="of the run; may be continued")
    add("--steps", type=int, default=2000, metavar="N", help="updates (2000)")
    add("--batch", type=int, default=2, metavar="B", help="rows an update (2)")
    add("--length", type=int, default=512, metavar="T", help="tokens a row (512)")
    add("--lr", type=float, default=1e-3, metavar="X", help="peak rate (0.001)")
    add("--every", type=int, default=200, metavar="N", help="steps a checkpoint (200)")
    add("--seed", type=int, default=0, help="of order and starting weights (0)")
    add("--start", metavar="HEAD", help="a head to go on from instead of a fresh one")
    add("--cache", metavar="FOLDER", help="keep the target's features there, for reuse")
    add("--smoke", action="store_true", help="a few short steps: does it run?")


def add_inspect(command: argparse.ArgumentParser) -> None:
    """Options of ``jspec inspect``."""
    command.set_defaults(run=_inspect)
    add = command.add_argument
    add("head", metavar="HEAD", help="folder of the head")
    add("--target", default="smollm2-135m", metavar="MODEL", help="(smollm2-135m)")
    add("--limit", type=int, default=6, metavar="N", help="prompts to try (6)")
    add("--max-new-tokens", type=int, default=32, metavar="N", help="of each (32)")


def _train(args: argparse.Namespace) -> None:
    from jspec.train.run import Options, train  # optax and orbax take a second

    model = load(args.target, dtype="float32")
    own: dict[str, Any] = {
        name: getattr(args, name)
        for name in ("steps", "batch", "length", "lr", "every", "seed", "cache")
    }
    smoke: dict[str, Any] = _SMOKE if args.smoke else {}
    options = Options(**(own | smoke))
    if args.start:
        options.recipe["start"] = _start(args.method, args.start, model)
    head = train(args.method, model, args.corpus, args.out, options, _say)
    _say(f"the head is in {head}")


def _start(method: str, folder: str, model: Model):
    """A head in the form in which the method's recipe goes on from it."""
    if method == "medusa":
        return load_medusa(folder, model, tree.line(1)).params
    return (load_mtp if method == "mtp" else load_eagle)(folder, model)


def _inspect(args: argparse.Namespace) -> None:
    model = load(args.target)
    for name, value in _facts(Path(args.head), model).items():
        print(f"{name:24}{value}")
    draft = load_drafter(args.head, model, **_single_guess(args.head))
    texts = [question.prompt for question in load_prompts(None, args.limit)]
    room = model.config.max_position - args.max_new_tokens
    encoded = encode(model.tokenizer, texts, model.config.vocab_size)
    prompts = [ids[:room] for ids in encoded]
    shares = [
        generate(
            model, draft, [prompt], max_new_tokens=args.max_new_tokens
        ).stats.acceptance_by_depth[0]
        for prompt in prompts
    ]
    print(f"{'first guess right':24}{sum(shares) / len(shares):.2f} of the rounds")


def _facts(folder: Path, model: Model) -> dict[str, object]:
    """What was understood of a folder, by name."""
    if is_medusa(read_config(folder)):
        return _medusa_facts(load_medusa(folder, model, tree.line(1)).params)
    if is_mtp(read_config(folder)):
        modules = load_mtp(folder, model)
        facts = {"prediction modules": len(modules.weights)}
        return facts | _facts_of(modules.design, modules.weights[0])
    head = load_eagle(folder, model)
    return {"layout": head.layout} | _facts_of(head.design, head.weights)


def _single_guess(folder: str) -> dict[str, Any]:
    """Options with which a head drafts its best token alone."""
    if is_medusa(read_config(Path(folder))):
        return {"gamma": 1}
    return {"grower": growth.chain(1, dense=False)}


def _medusa_facts(weights: Medusa) -> dict[str, object]:
    rows, width = weights.heads[0].vocab.shape
    return {
        "kind": "medusa",
        "heads": f"{len(weights.heads)} of width {width}, {weights.layers} blocks each",
        "draft vocabulary": f"{rows} ids" if weights.to_target is not None else "all",
        "parameters": _millions(weights.heads),
    }


def _facts_of(design: Design, weights: Weights) -> dict[str, object]:
    config = design.config
    taps = ", ".join(map(str, design.taps))
    own = dataclasses.replace(weights, embed=None, to_target=None)
    return {
        "kind": design.first.__name__,
        "layers": f"{config.layers} of width {config.hidden}, {config.heads} heads, "
        f"{config.kv_heads} kv heads of {config.head_dim}",
        "features": "the last hidden state"
        if design.taps == (-1,)
        else f"what layers {taps} receive",
        "rope": f"base {config.ropes[0].theta:g}, {config.ropes[0].kind}",
        "fc bias": weights.fc_bias is not None,
        "norm before fc": weights.feature_norm is not None,
        "norm before residual": design.norm_before_residual,
        "normed output fed back": design.norm_output,
        "vocabulary": f"{weights.head.shape[0]} of {weights.embed.shape[0]} ids",
        "parameters": _millions(own),
    }


def _millions(weights: Any) -> str:
    return f"{sum(x.size for x in jax.tree.leaves(weights)) / 1e6:.1f}M"


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
