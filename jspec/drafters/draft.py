"""A drafter together with its weights."""

from __future__ import annotations

from typing import Any, NamedTuple

from jspec.types import Drafter


class Draft(NamedTuple):
    """A drafter and its weights, ready to be used with one target.

    Attributes:
      drafter: the pure functions.  params: its weights, or None.
      name: for tables and logs.
      vocab_size: the target vocabulary it was made for, or None if any will do.
    """

    drafter: Drafter
    params: Any = None
    name: str = "drafter"
    vocab_size: int | None = None
