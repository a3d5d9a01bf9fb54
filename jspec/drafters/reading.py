"""From a folder to the head in it, whatever kind and layout it has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from jspec.drafters.dflash_configs import is_dflash
from jspec.drafters.heads import Blockwise, Medusa
from jspec.drafters.published_assistant import (
    Assistant,
    is_assistant,
    load_assistant,
)
from jspec.drafters.published_dflash import BlockHead, load_dflash
from jspec.drafters.published_eagle import Head, is_eagle, load_eagle
from jspec.drafters.published_medusa import is_medusa, read_medusa
from jspec.drafters.published_mtp import Modules, is_mtp, load_mtp
from jspec.drafters.stored_blockwise import is_blockwise, read_blockwise
from jspec.drafters.tensors import read_config
from jspec.models import Model

AnyHead = Head | BlockHead | Modules | Medusa | Blockwise | Assistant
_KINDS: tuple[tuple[Callable[[dict], bool], Callable[..., AnyHead]], ...] = (
    (is_dflash, load_dflash),
    (is_eagle, load_eagle),
    (is_medusa, read_medusa),
    (is_blockwise, read_blockwise),
    (is_mtp, load_mtp),
    (is_assistant, load_assistant),
)


def reader(config: dict) -> Callable[..., AnyHead] | None:
    """``(folder, target) -> head`` for a ``config.json``; None if it is of no head."""
    return next((read for is_kind, read in _KINDS if is_kind(config)), None)


def read_head(folder: Path, target: Model) -> AnyHead:
    """The head in a folder, joined to its target.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: no head, or one for another target; see the readers of each kind.
    """
    read = reader(read_config(folder))
    if read is None:
        raise ValueError(
            f"{folder} holds neither an EAGLE head, a DFlash or DSpark drafter, Medusa or "
            "blockwise heads, prediction modules nor a Gemma 4 assistant"
        )
    return read(folder, target)
