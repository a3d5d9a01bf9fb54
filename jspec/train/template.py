"""The fixed tokens of a chat, found from a tokenizer's chat template."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any, NamedTuple

# Two turns without a common token: what their renderings share is the template's.
_PROBES = "yes", "42"


class Template(NamedTuple):
    """What a conversation of one user turn and one answer is made of.

    Its tokens are ``prefix``, the user's words, ``turn``, the answer, an
    end-of-sequence token.

    Attributes:
      prefix: everything before the user's words, a default system prompt included.
      turn: everything between them and the answer. A model that writes the user's part
        itself ends it with the first of these tokens.
    """

    prefix: tuple[int, ...]
    turn: tuple[int, ...]


def template(tokenizer: Any) -> Template:
    """The template of a transformers tokenizer.

    Raises:
      ValueError: the tokenizer is None, has no chat template, or has one that does not
        put the user's words between fixed tokens.
    """
    if tokenizer is None or tokenizer.chat_template is None:
        raise ValueError(
            "conversations need a tokenizer with a chat template, and this model has "
            "none; take an instruction-tuned model"
        )
    one, other = (_render(tokenizer, words) for words in _PROBES)
    prefix, turn = _common(one, other), _common(one[::-1], other[::-1])[::-1]
    if not prefix or not turn:
        raise ValueError(
            f"the chat template renders the user turn {_PROBES[0]!r} as the tokens "
            f"{one}; the turn must stand between fixed tokens"
        )
    return Template(tuple(prefix), tuple(turn))


def _render(tokenizer: Any, words: str) -> list[int]:
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": words}],
        add_generation_prompt=True,
        return_dict=False,
    )
    return [int(i) for i in ids]


def _common(one: list[int], other: list[int]) -> list[int]:
    """The longest common beginning."""
    pairs = itertools.takewhile(lambda p: p[0] == p[1], zip(one, other, strict=False))
    return [a for a, _ in pairs]


def user_tokens(tokenizer: Any, words: str) -> list[int]:
    """Token ids of a user's words where the template puts them.

    Raises:
      ValueError: the tokens around them are not those of ``template``.
    """
    prefix, turn = template(tokenizer)
    ids = _render(tokenizer, words)
    start, stop = len(prefix), len(ids) - len(turn)
    if tuple(ids[:start]) != prefix or tuple(ids[stop:]) != turn:
        raise ValueError(
            f"the chat template surrounds {words[:40]!r} with other tokens than a "
            "plain turn; it must not depend on the user's words"
        )
    return ids[start:stop]


def fingerprint(tokenizer: Any) -> str:
    """A hash of the vocabulary: equal iff all ids stand for the same strings."""
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    lines = "\n".join(f"{index} {token!r}" for token, index in vocab)
    return hashlib.sha256(lines.encode()).hexdigest()
