"""``jspec inspect`` and ``jspec export``."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

import jax

from jspec.arguments import add_target
from jspec.drafters import growth, load_drafter
from jspec.drafters.dflash_configs import LAYOUTS
from jspec.drafters.eagle import Design, Weights
from jspec.drafters.eagle_configs import OFFICIAL, SPECULATORS
from jspec.drafters.heads import Blockwise, Medusa
from jspec.drafters.published_assistant import Assistant
from jspec.drafters.published_dflash import BlockHead, save_dflash
from jspec.drafters.published_eagle import Head, save_eagle
from jspec.drafters.published_medusa import save_medusa
from jspec.drafters.published_mtp import Modules, save_mtp
from jspec.drafters.reading import AnyHead, read_head
from jspec.drafters.stored_blockwise import save_blockwise
from jspec.generation import generate
from jspec.models import load
from jspec.models.load import fetch
from jspec.prompts import load_prompts
from jspec.text import encode

INSPECT = """Shows what a published head was understood to be, and whether it guesses right.

  jspec inspect runs/eagle3/head --target smollm2-135m

The share of first guesses that are right is about 0.7 to 0.8 for a good head on text like
that it was trained on; 0.1 to 0.3 hints at a wrong norm, residual or layer.
"""

EXPORT = """Writes a head in a layout that others read.

  jspec export runs/eagle3/head exported --layout speculators

EAGLE-3 heads have the authors' layout, which SpecForge and SGLang read too, and that of
the speculators library, which vLLM reads. DFlash and DSpark drafters have four: zlab,
specforge, deepspec and speculators, and not all can say everything. Medusa heads with a draft vocabulary are
written as vLLM reads them, others as the authors do; prediction modules as speculators.
"""


def add_inspect(command: argparse.ArgumentParser) -> None:
    """Options of ``jspec inspect``."""
    command.set_defaults(run=_inspect)
    add = command.add_argument
    add("head", metavar="HEAD", help="folder or Hub id of the head")
    add_target(command)
    add("--limit", type=int, default=6, metavar="N", help="prompts to try (6)")
    add("--max-new-tokens", type=int, default=32, metavar="N", help="of each (32)")


def add_export(command: argparse.ArgumentParser) -> None:
    """Options of ``jspec export``."""
    command.set_defaults(run=_export)
    add = command.add_argument
    add("head", metavar="HEAD", help="folder or Hub id of the head")
    add("folder", metavar="FOLDER", help="written to; made if it is missing")
    add("--target", default="smollm2-135m", metavar="MODEL", help="(smollm2-135m)")
    add(
        "--layout",
        choices=(OFFICIAL, *LAYOUTS),
        help="of an EAGLE-3, DFlash or DSpark head (the one it has)",
    )
    add("--dtype", default="bfloat16", metavar="NAME", help="of the floats (bfloat16)")
    add(
        "--embedding",
        action="store_true",
        help="write the target's embedding too, which EAGLE-1's own loader wants",
    )


def _export(args: argparse.Namespace) -> None:
    model = load(args.target, dtype="float32")
    head = read_head(fetch(args.head, pickled=True), model)
    size = model.config.vocab_size
    _check_layout(head, args)
    if isinstance(head, BlockHead):
        head = dataclasses.replace(head, layout=args.layout or head.layout)
        save_dflash(head, args.folder, args.dtype)
    elif isinstance(head, Head):
        head = dataclasses.replace(head, layout=args.layout or head.layout)
        save_eagle(head, args.folder, args.dtype, embedding=args.embedding)
    elif isinstance(head, Modules):
        save_mtp(head, args.folder, args.dtype)
    elif isinstance(head, Medusa):
        name = args.target
        save_medusa(head, args.folder, args.dtype, base=name, vocab_size=size)
    elif isinstance(head, Blockwise):
        save_blockwise(head, args.folder, size, args.dtype)
    else:
        message = f"{args.head} is an assistant; those are read, not written"
        raise ValueError(message)  # noqa: TRY004, it is the wrong folder
    print(f"the head is in {args.folder}", file=sys.stderr)


def _check_layout(head: AnyHead, args: argparse.Namespace) -> None:
    """Refuses options that heads of this kind do not have."""
    if isinstance(head, BlockHead):
        if args.embedding or args.layout == OFFICIAL:
            raise ValueError(
                f"{args.head} is a DFlash or DSpark drafter; its layouts are "
                f"{', '.join(LAYOUTS)}, and --embedding is not for those"
            )
    elif isinstance(head, Head):
        if args.layout not in (None, OFFICIAL, SPECULATORS):
            raise ValueError(
                f"{args.head} is an EAGLE head; its layouts are {OFFICIAL} and "
                f"{SPECULATORS}"
            )
    elif args.layout or args.embedding:
        raise ValueError(
            f"{args.head} is no EAGLE head; --layout and --embedding are for those"
        )


def _inspect(args: argparse.Namespace) -> None:
    model = load(args.target, dtype=args.dtype)
    folder = fetch(args.head, pickled=True)
    head = read_head(folder, model)
    for name, value in _facts(head).items():
        print(f"{name:24}{value}")
    one: dict[str, Any] = {"grower": growth.chain(1, dense=False)}
    if isinstance(head, BlockHead):
        one = {"gamma": 1, "dense": False}
    elif isinstance(head, Assistant):
        one = {"gamma": 1}
    draft = load_drafter(folder, model, **one)
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


def _facts(head: AnyHead) -> dict[str, object]:
    """What was understood of a head, by name."""
    if isinstance(head, Medusa):
        return _medusa_facts(head)
    if isinstance(head, Blockwise):
        return _blockwise_facts(head)
    if isinstance(head, Modules):
        facts = {"prediction modules": len(head.weights)}
        return facts | _facts_of(head.design, head.weights[0])
    if isinstance(head, BlockHead):
        return _block_facts(head)
    if isinstance(head, Assistant):
        return _assistant_facts(head)
    return {"layout": head.layout} | _facts_of(head.design, head.weights)


def _medusa_facts(weights: Medusa) -> dict[str, object]:
    rows, width = weights.heads[0].vocab.shape
    return {
        "kind": "medusa",
        "heads": f"{len(weights.heads)} of width {width}, {weights.layers} blocks each",
        "draft vocabulary": "all" if weights.to_target is None else f"{rows} ids",
        "parameters": _millions(weights.heads),
    }


def _blockwise_facts(weights: Blockwise) -> dict[str, object]:
    count, width, inner = weights.down.shape
    own = dataclasses.replace(weights, vocab=None, to_target=None)
    rows = len(weights.vocab)
    return {
        "kind": "blockwise",
        "heads": f"{count} of width {width} with {inner // count} hidden units each",
        "draft vocabulary": "all" if weights.to_target is None else f"{rows} ids",
        "parameters": _millions(own),
    }


def _block_facts(head: BlockHead) -> dict[str, object]:
    design, weights = head.design, head.weights
    config, rows = design.config, len(weights.embed)
    own = dataclasses.replace(weights, embed=None, head=None, to_target=None)
    drafted = rows if weights.to_target is None else len(weights.to_target)
    return {
        "kind": f"block diffusion, {design.choose.__name__}",
        "layout": head.layout,
        "block": f"{design.block} rows, which guess "
        + ("the next token" if design.next_token else "their own"),
        "mask token": design.mask_id,
        "layers": f"{config.layers} of width {config.hidden}",
        "features": f"after {', '.join(map(str, design.taps))} layers",
        "path": "ignored" if design.link is None else design.link.__name__,
        "confidence": weights.confidence is not None,
        "vocabulary": f"{drafted} of {rows} ids",
        "parameters": _millions(own),
    }


def _assistant_facts(head: Assistant) -> dict[str, object]:
    config, weights = head.design.config, head.weights
    clusters = "all tokens"
    if weights.centroids is not None:
        clusters = f"{head.design.clusters} of {len(weights.centroids)} clusters"
    return {
        "kind": "assistant on the target's keys and values",
        "layers": f"{config.layers} of width {config.hidden}, {config.heads} heads",
        "reads": f"target layers {', '.join(map(str, head.design.sources))}",
        "logits of": clusters,
        "parameters": _millions(dataclasses.replace(weights, embed=None, members=None)),
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
