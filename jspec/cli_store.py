"""``jspec store``: a datastore for REST and suffix decoding from texts."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from jspec.models import Model, load

STORE = """Builds a store of texts to copy drafts from.

  jspec store corpus.npz --out stores/own          conversations of jspec selfgen
  jspec store notes.txt code.jsonl --out stores/my  text files; JSON lines with "text"

Answers of conversations are stored, other files whole. The store is memory-mapped.
"""


def add_store(command: argparse.ArgumentParser) -> None:
    """Options of ``jspec store``."""
    command.set_defaults(run=_store)
    add = command.add_argument
    add("texts", nargs="+", metavar="FILE", help=".npz, .jsonl, or any text file")
    add("--target", default="smollm2-135m", metavar="MODEL", help="(smollm2-135m)")
    add("--out", required=True, metavar="FOLDER", help="written to; made if missing")
    add("--tokens", type=int, metavar="N", help="keep the last N tokens (all)")


def _store(args: argparse.Namespace) -> None:
    from jspec.drafters import store

    model = load(args.target, dtype="float32")
    texts = latest(list(read(args.texts, model)), args.tokens)
    made = store.build(texts)
    store.save(made, args.out)
    print(
        f"{made.tokens.size} tokens of {len(texts)} texts are in {args.out}",
        file=sys.stderr,
    )


def read(paths: Sequence[str], model: Model) -> Iterator[Sequence[int]]:
    """Token ids of every text in the files.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a line is no JSON object with ``text``; a damaged corpus.
    """
    from jspec.train import corpus

    for path in map(Path, paths):
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}")
        if path.suffix == ".npz":
            for document in corpus.read([path], model.tokenizer).documents:
                yield document.tokens[document.mask].tolist()
        elif path.suffix == ".jsonl":
            lines = path.read_text(encoding="utf-8").splitlines()
            for number, line in enumerate(lines, 1):
                yield model.tokenizer(_text(line, f"{path}, line {number}"))[
                    "input_ids"
                ]
        else:
            yield model.tokenizer(path.read_text(encoding="utf-8"))["input_ids"]


def _text(line: str, where: str) -> str:
    try:
        return dict(json.loads(line))["text"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{where}: not a JSON object with the field 'text' ({error})"
        ) from error


def latest(texts: list[Sequence[int]], most: int | None) -> list[Sequence[int]]:
    """The last texts that have no more than ``most`` tokens together.

    Raises:
      ValueError: not even the last one fits.
    """
    if most is None:
        return texts
    kept: list[Sequence[int]] = []
    for text in reversed(texts):
        most -= len(text)
        if most < 0:
            break
        kept.append(text)
    if not kept:
        raise ValueError(
            f"the last text alone has {len(texts[-1])} tokens; allow that many, or more"
        )
    return kept[::-1]
