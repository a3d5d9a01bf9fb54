"""Conversations that a target wrote itself: their file form, and training rows.

A file is an ``.npz`` of streams, each a chain of conversations, one a column:

    tok     [steps, streams] uint16 or uint32, token ids
    phase   [steps, streams] uint8: 0 user's words and the token that ends them,
            1-5 the other tokens between them and the answer, 6 answer
    temp    [steps, streams] float16, temperature of the answer
    prefix  [n] int32, the tokens before the user's words, stored once
    eos     [n] int32, ids that end an answer
    cap     int32, an answer of so many tokens was cut: its last id was not drawn
    target, tokenizer   name of the model and hash of its vocabulary

Older files hold only the first three arrays. Their prefix and end are those of the
tokenizer's chat template, their cap is the longest answer, and that they belong to the
tokenizer is seen from the tokens of phases 1 to 5.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jspec.train.atomic import replacing
from jspec.train.packing import Rows, batches, order, rows
from jspec.train.template import Template, fingerprint, template

__all__ = [
    "Conversation",
    "Corpus",
    "Document",
    "Rows",
    "batches",
    "order",
    "read",
    "rows",
    "split",
    "write",
]

_USER, _TURN, _ANSWER = 0, 5, 6  # first, last of the turn's, and answer phase


class Document(NamedTuple):
    """One conversation: ``tokens [T]`` int32 from the template's prefix on, and ``mask
    [T]`` bool, True for the tokens of the answer."""

    tokens: np.ndarray
    mask: np.ndarray


class Corpus(NamedTuple):
    """Conversations in the tokens of one tokenizer.

    Attributes:
      documents: in the order of their files and streams.
      target: who wrote them; several names are joined by commas, and a file without a
        name gives ``unknown``.
      tokenizer: hash of the vocabulary (``template.fingerprint``).
    """

    documents: list[Document]
    target: str
    tokenizer: str

    @property
    def tokens(self) -> int:
        """Number of tokens, prefixes included."""
        return sum(len(d.tokens) for d in self.documents)


class Conversation(NamedTuple):
    """What ``write`` takes.

    Attributes:
      user: the user's words and the first token of ``Template.turn``.
      answer: ends with an end-of-sequence token, also where it was cut.
      temperature: the answer was drawn at.
    """

    user: Sequence[int]
    answer: Sequence[int]
    temperature: float


def read(paths: Sequence[str | Path], tokenizer: Any) -> Corpus:
    """Reads files of conversations; unfinished ones at the end of a stream are left out.

    An end-of-sequence token that was written because an answer became too long is no
    word of the target's, and is left out as well.

    Args:
      paths: one or more files.
      tokenizer: the target's transformers tokenizer.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a file is damaged, was written in another tokenizer's tokens, or holds
        no finished conversation; the tokenizer has no chat template.
    """
    if not paths:
        raise ValueError("no corpus files; give at least one")
    form, own = template(tokenizer), fingerprint(tokenizer)
    documents: list[Document] = []
    names: list[str] = []
    for path in map(Path, paths):
        arrays = _load(path)
        _check(path, arrays, tokenizer, own, form)
        found = list(_documents(arrays, form, tokenizer.eos_token_id))
        if not found:
            raise ValueError(
                f"{path} holds no finished conversation; write a longer one"
            )
        documents += found
        names.append(str(arrays.get("target", "unknown")))
    return Corpus(documents, ", ".join(dict.fromkeys(names)), own)


def split(corpus: Corpus, share: float = 0.05) -> tuple[Corpus, Corpus]:
    """``(training, held out)``: the last ``share`` of the conversations is held out.

    Raises:
      ValueError: either part would be empty.
    """
    count = len(corpus.documents)
    held = round(count * share)
    if not 0 < held < count:
        raise ValueError(
            f"a share of {share} of {count} conversations holds out {held}; both parts "
            "need at least one, so change the share or read more files"
        )
    return (
        corpus._replace(documents=corpus.documents[:-held]),
        corpus._replace(documents=corpus.documents[-held:]),
    )


def write(
    path: str | Path,
    conversations: Sequence[Conversation],
    *,
    form: Template,
    eos_ids: Sequence[int],
    cap: int,
    target: str,
    tokenizer: str,
) -> None:
    """Writes conversations as a file of one stream; a killed write leaves no file.

    Args:
      form: the template they were written with.
      eos_ids: ids that end an answer.
      cap: tokens of an answer that was cut, the written end included.
      target: name of the model.  tokenizer: ``template.fingerprint`` of its tokenizer.

    Raises:
      OSError: the file cannot be written, for instance because the disk is full.
    """
    tokens: list[int] = []
    phases: list[int] = []
    temps: list[float] = []
    between = form.turn[1:]
    fixed = [min(i + 1, _TURN) for i in range(len(between))]
    for user, answer, temperature in conversations:
        tokens += [*user, *between, *answer]
        phases += [_USER] * len(user) + fixed + [_ANSWER] * len(answer)
        temps += [temperature] * (len(user) + len(fixed) + len(answer))
    small = max(tokens, default=0) < 2**16
    with replacing(Path(path)) as file:
        np.savez_compressed(
            file,
            tok=np.array(tokens, np.uint16 if small else np.uint32)[:, None],
            phase=np.array(phases, np.uint8)[:, None],
            temp=np.array(temps, np.float16)[:, None],
            prefix=np.array(form.prefix, np.int32),
            eos=np.array(eos_ids, np.int32),
            cap=np.int32(cap),
            target=np.array(target),
            tokenizer=np.array(tokenizer),
        )


# --- reading --------------------------------------------------------------------------


def _load(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no corpus file {path}")
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
            arrays = dict(stored)
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{path} is cut off or no .npz file ({error}); fetch or write it again"
        ) from error
    missing = [name for name in ("tok", "phase", "temp") if name not in arrays]
    if missing:
        raise ValueError(f"{path} is no corpus: it lacks the array {missing[0]!r}")
    shape = arrays["tok"].shape
    for name in ("tok", "phase", "temp"):
        if arrays[name].ndim != 2 or arrays[name].shape != shape:
            raise ValueError(
                f"{path}: {name} has shape {arrays[name].shape} and tok {shape}; both "
                "must be [steps, streams]"
            )
    return arrays


def _check(path: Path, arrays: dict, tokenizer: Any, own: str, form: Template) -> None:
    """Raises unless a file is in the tokens of this tokenizer and template."""
    theirs = str(arrays.get("tokenizer", own))
    if theirs != own:
        raise ValueError(
            f"{path} was written by {arrays.get('target', 'unknown')} with another "
            f"tokenizer (vocabulary {theirs[:12]}, here {own[:12]}); let this target "
            "write a corpus of its own"
        )
    top = int(arrays["tok"].max(initial=0))
    if top >= len(tokenizer):
        raise ValueError(
            f"{path} holds token id {top}, outside the vocabulary of {len(tokenizer)}: "
            "it was written with another tokenizer"
        )
    between = form.turn[1:]
    for phase in range(1, min(len(between), _TURN - 1) + 1):
        found = np.unique(arrays["tok"][arrays["phase"] == phase])
        if len(found) and found.tolist() != [between[phase - 1]]:
            raise ValueError(
                f"{path} has tokens {found[:4].tolist()} in phase {phase}, where the "
                f"chat template of this tokenizer has {between[phase - 1]}: it was "
                "written with another tokenizer or template"
            )


def _documents(arrays: dict, form: Template, eos_id: int) -> Iterator[Document]:
    prefix = np.asarray(arrays.get("prefix", form.prefix), np.int32)
    eos_ids = np.asarray(arrays.get("eos", [eos_id]))
    found = []
    for tokens, phase in zip(arrays["tok"].T, arrays["phase"].T, strict=True):
        for start, stop in _finished(tokens, phase, eos_ids):
            found.append((tokens[start:stop], phase[start:stop] == _ANSWER))
    cap = int(arrays.get("cap", max((mask.sum() for _, mask in found), default=0)))
    for tokens, mask in found:
        keep = len(tokens) - (mask.sum() >= cap)
        yield Document(
            np.concatenate([prefix, tokens[:keep].astype(np.int32)]),
            np.concatenate([np.zeros(len(prefix), bool), mask[:keep]]),
        )


def _finished(tokens: np.ndarray, phase: np.ndarray, eos_ids) -> list[tuple[int, int]]:
    """Start and end of the finished conversations of one stream."""
    is_end = (phase == _ANSWER) & np.isin(tokens, eos_ids)
    ends = np.flatnonzero(is_end) + 1
    starts = np.concatenate([[0], ends])[: len(ends)]
    return list(zip(starts.tolist(), ends.tolist(), strict=True))
