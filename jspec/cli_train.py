"""``jspec selfgen`` and ``jspec train``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from jspec.arguments import add_target
from jspec.drafters.heads import Blockwise, Medusa
from jspec.drafters.published_dflash import BlockHead
from jspec.drafters.published_eagle import Head
from jspec.drafters.published_mtp import Modules
from jspec.drafters.reading import AnyHead, read_head
from jspec.models import Model, load
from jspec.models.load import fetch
from jspec.prompts import OPENINGS, load_prompts

TRAIN = """Trains a head for a target on text that the target wrote itself.

  jspec train eagle3 --target smollm2-135m --corpus corpus.npz --out runs/eagle3
  jspec train eagle3 --target smollm2-135m --corpus corpus.npz --out runs/try --smoke

Killed or interrupted, the same command goes on where it was. The head is in OUT/head, in
the layout that others publish, and drafts with --draft OUT/head.
"""

SELFGEN = """Writes a corpus for training: conversations of the target with itself.

  jspec selfgen corpus --target smollm2-135m --conversations 2000
  jspec selfgen corpus --target smollm2-135m --openings
  jspec selfgen corpus --target smollm2-135m --prompts questions.jsonl

Without --prompts the target writes the questions as well; with --openings it is given how
they begin, and so asks about more. Killed or interrupted, the same command goes on where it
was; train on it with --corpus corpus/*.npz.
"""

# Methods with a draft vocabulary: it can be chosen anew for a head, or for fresh ones only.
_CHOOSES = ("eagle1", "eagle3", "mtp")
_CHOOSES_ONCE = ("blockwise", "dflash", "dspark", "medusa")
_SMOKE = {"steps": 6, "every": 3, "held": 4, "warmup": 2}


def add_selfgen(command: argparse.ArgumentParser) -> None:
    """Options of ``jspec selfgen``."""
    command.set_defaults(run=_selfgen)
    add = command.add_argument
    add("out", metavar="FOLDER", help="of the corpus; may be continued")
    add_target(command)
    add(
        "--conversations",
        type=int,
        metavar="N",
        help="how many (one a prompt, or 2000 without --prompts)",
    )
    words = command.add_mutually_exclusive_group()
    words.add_argument(
        "--prompts", metavar="FILE", help="JSON lines with turns; the first is answered"
    )
    words.add_argument(
        "--openings",
        nargs="?",
        const=OPENINGS,
        metavar="FILE",
        help="the same, but the target finishes the turn first (a set that comes with jspec)",
    )
    add("--user-cap", type=int, default=96, metavar="N", help="longest question (96)")
    add("--answer-cap", type=int, default=256, metavar="N", help="longest answer (256)")
    add(
        "--temperatures",
        type=float,
        nargs="+",
        default=[0.0, 0.0, 0.6, 1.0],
        metavar="T",
        help="of the answers, equally often (0 0 0.6 1)",
    )
    add("--rows", type=int, default=32, metavar="B", help="written at a time (32)")
    add("--part", type=int, default=256, metavar="N", help="conversations a file (256)")
    add("--seed", type=int, default=0, help="of everything drawn (0)")


def _selfgen(args: argparse.Namespace) -> None:
    from jspec.train.selfgen import selfgen

    model = load(args.target, dtype=args.dtype)
    count = args.conversations
    if count is None and not args.prompts:
        count = 2000
    files = selfgen(
        model,
        args.out,
        conversations=count,
        prompts=_words(args.prompts),
        openings=_words(args.openings),
        seed=args.seed,
        rows=args.rows,
        part=args.part,
        **({} if args.prompts else {"user_cap": args.user_cap}),
        answer_cap=args.answer_cap,
        temperatures=tuple(args.temperatures),
    )
    _say(f"the corpus is in {' '.join(map(str, files))}")


def _words(file: str | Path | None) -> list[str] | None:
    return None if file is None else [str(q.prompt) for q in load_prompts(file)]


def add_train(command: argparse.ArgumentParser) -> None:
    """Options of ``jspec train``."""
    command.set_defaults(run=_train)
    add = command.add_argument
    add(
        "method",
        metavar="METHOD",
        help="blockwise, dflash, dflash2, dspark, eagle1 (EAGLE-2's too), eagle3, "
        "medusa, mtp, small",
    )
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
    add("--rows", type=int, metavar="N", help="most rows to learn from (all)")
    add("--start", metavar="HEAD", help="a head to go on from instead of a fresh one")
    add(
        "--draft-vocab",
        type=int,
        metavar="N",
        help="tokens a head can draft, the corpus' most frequent (8192; of medusa and "
        "blockwise 4096; with --start those of that head, which eagle1, eagle3 and mtp "
        "can exchange)",
    )
    add("--cache", metavar="FOLDER", help="keep the target's features there, for reuse")
    add(
        "--products",
        choices=("float32", "bfloat16"),
        default="float32",
        help="precision of large products; bfloat16 is faster where the chip has it",
    )
    add("--smoke", action="store_true", help="a few short steps: does it run?")


def _train(args: argparse.Namespace) -> None:
    from jspec.train.run import Options, train  # optax and orbax take a second

    model = load(args.target, dtype="float32")
    own: dict[str, Any] = {
        name: getattr(args, name)
        for name in (
            "steps",
            "batch",
            "length",
            "lr",
            "every",
            "rows",
            "seed",
            "cache",
            "products",
        )
    }
    smoke: dict[str, Any] = _SMOKE if args.smoke else {}
    options = Options(**(own | smoke))
    if args.draft_vocab is not None:
        if args.method not in (_CHOOSES if args.start else {*_CHOOSES, *_CHOOSES_ONCE}):
            whose = "of --start" if args.method in _CHOOSES_ONCE else "of the target"
            raise ValueError(
                f"{args.method} keeps the vocabulary {whose}; leave --draft-vocab out"
            )
        options.recipe["draft_vocab"] = args.draft_vocab
    if args.start:
        options.recipe["start"] = _start(args.method, args.start, model)
    head = train(args.method, model, args.corpus, args.out, options, _say)
    _say(f"the head is in {head}")


def _start(method: str, name: str, model: Model) -> Model | AnyHead:
    """A head in the form in which the method's recipe goes on from it."""
    if method == "small":
        return load(name, dtype="float32")
    head = read_head(fetch(name, pickled=True), model)
    kinds = {"blockwise": Blockwise, "medusa": Medusa, "mtp": Modules}
    kinds |= dict.fromkeys(("dflash", "dflash2", "dspark"), BlockHead)
    if type(head) is not kinds.get(method, Head):
        raise ValueError(f"{name} is no head that {method} could go on from")
    return head


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
