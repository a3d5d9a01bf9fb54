"""Between text and token ids: prompts, stop strings, streaming detokenisation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

Prompt = str | Sequence[int]


def encode(
    tokenizer: Any, prompts: Sequence[Prompt], vocab_size: int, chat: bool | None = None
) -> list[list[int]]:
    """Token ids of every prompt.

    Args:
      tokenizer: a transformers tokenizer, or None if all prompts are ids.
      prompts: strings or lists of token ids; ids are taken as they are.
      vocab_size: ids must lie below it.
      chat: apply the chat template to strings? None: if the tokenizer has one.

    Raises:
      ValueError: an empty prompt, an id outside the vocabulary, a string without a
        tokenizer, or ``chat=True`` without a template.
    """
    return [
        _encode_one(tokenizer, p, i, vocab_size, chat) for i, p in enumerate(prompts)
    ]


def _encode_one(tokenizer, prompt: Prompt, row: int, vocab_size: int, chat):
    if isinstance(prompt, str):
        ids = _tokenize(tokenizer, prompt, row, chat)
    else:
        ids = [int(i) for i in prompt]
    if not ids:
        raise ValueError(f"prompt {row} is empty; give at least one token")
    outside = [i for i in ids if not 0 <= i < vocab_size]
    if outside:
        raise ValueError(
            f"prompt {row} holds token id {outside[0]}, outside the vocabulary of "
            f"{vocab_size}"
        )
    return ids


def _tokenize(tokenizer, prompt: str, row: int, chat: bool | None) -> list[int]:
    if tokenizer is None:
        raise ValueError(
            f"prompt {row} is a string but the model has no tokenizer; pass token ids"
        )
    if not prompt.strip():
        raise ValueError(f"prompt {row} is empty; give at least one token")
    if chat is None:
        chat = tokenizer.chat_template is not None
    if not chat:
        return tokenizer(prompt)["input_ids"]
    if tokenizer.chat_template is None:
        raise ValueError("chat=True, but the tokenizer has no chat template")
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_dict=False,
    )


@dataclasses.dataclass
class Detokenizer:
    """Turns one row's growing token list into text, piece by piece.

    Joined pieces equal the text of the whole list: bytes of a character that is not
    complete yet, and text that may become a stop string, are held back until decided.

    Attributes:
      tokenizer: a transformers tokenizer.
      stop: stop strings; the text ends before the first one that occurs.
      tokens: ids so far.  text: text given out so far.
    """

    tokenizer: Any
    stop: tuple[str, ...] = ()
    tokens: list[int] = dataclasses.field(default_factory=list)
    text: str = ""

    def feed(self, tokens: Sequence[int]) -> tuple[str, int | None]:
        """Adds ids; returns the new text and, if a stop string is now complete, how many
        ids in all it took to complete it (further ids are dropped), else None."""
        seen = len(self.tokens)
        self.tokens.extend(int(t) for t in tokens)
        whole = self._decode(len(self.tokens))
        if self._stop_at(whole) is not None:
            keep = self._completed_by(seen)
            del self.tokens[keep:]
            whole = self._decode(keep)
            at = self._stop_at(whole)
            return self._give(whole[:at]), keep
        return self._give(whole[: len(whole) - self._undecided(whole)]), None

    def flush(self) -> str:
        """The text still held back; call it when the row has ended."""
        whole = self._decode(len(self.tokens))
        return self._give(whole[: self._stop_at(whole)])

    def _decode(self, count: int) -> str:
        return self.tokenizer.decode(self.tokens[:count], skip_special_tokens=True)

    def _give(self, text: str) -> str:
        new = text[len(self.text) :]
        self.text = self.text + new
        return new

    def _stop_at(self, text: str) -> int | None:
        found = [text.find(s) for s in self.stop if s in text]
        return min(found) if found else None

    def _completed_by(self, seen: int) -> int:
        """Smallest number of ids whose text holds a stop string (more than ``seen``)."""
        for count in range(seen + 1, len(self.tokens)):
            if self._stop_at(self._decode(count)) is not None:
                return count
        return len(self.tokens)

    def _undecided(self, text: str) -> int:
        """How many characters at the end may still change or become a stop string."""
        broken = len(text) - len(text.rstrip("\ufffd"))
        body = text[: len(text) - broken]
        partial = [
            n for s in self.stop for n in range(1, len(s)) if body.endswith(s[:n])
        ]
        return broken + max(partial, default=0)
