"""Tensors of a checkpoint -> ``Weights``, one fused array at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import jax
import numpy as np

from jspec.models import names, tensorfile
from jspec.models.config import Config
from jspec.models.transformer import Weights


class Checkpoint(Protocol):
    """A source of tensors under transformers' names; ``path`` is for messages."""

    path: Path
    tensors: dict[str, tuple[int, ...]]

    def read(self, name: str, out: np.ndarray) -> None:
        """Reads a tensor into memory of its size, cast to the memory's dtype."""
        ...


class Safetensors:
    """One or several safetensors files as one ``Checkpoint``."""

    def __init__(self, path: Path, files: list[Path]):
        self.path = path
        self._stored: dict[str, tuple[str, tensorfile.Stored]] = {}
        for file in files:
            for key, stored in tensorfile.index(file).items():
                self._stored[_text_name(key)] = key, stored
        self.tensors = {name: s.shape for name, (_, s) in self._stored.items()}

    def read(self, name: str, out: np.ndarray) -> None:
        key, stored = self._stored[name]
        tensorfile.read(key, stored, out)


def build(config: Config, source: Checkpoint, dtype) -> Weights:
    """The weights of ``source`` in ``dtype``, on the default device.

    Some stay float32, see ``names.dtype_of``.

    Every tensor is read straight into its fused array, which a CPU device takes over as
    it is: peak host memory is the weights and one tensor.

    Raises:
      ValueError: tensors that are missing, left over or of the wrong shape.
    """
    table = names.places(config)
    _check(config, source, table)
    in_array: dict[names.Path, list[str]] = {}
    for name, place in table.items():
        in_array.setdefault(place.path, []).append(name)
    arrays = {}
    # The largest array first, while there is still room for a second copy of it.
    by_size = sorted(names.arrays(config).items(), key=lambda item: -np.prod(item[1]))
    for path, shape in by_size:
        host = _aligned(shape, names.dtype_of(path, dtype))
        for name in in_array[path]:
            source.read(name, host[table[name].index])
        # Waiting keeps transfers to an accelerator from piling up in host memory.
        arrays[path] = jax.block_until_ready(jax.device_put(host))
    return names.assemble(config, arrays)


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory that a CPU device adopts without a copy: aligned to 64 bytes."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def _text_name(key: str) -> str:
    """The text model's own name of a tensor of a multimodal wrapper."""
    for prefix in ("model.language_model.", "language_model.model."):
        if key.startswith(prefix):
            return "model." + key.removeprefix(prefix)
    return key.removeprefix("language_model.")


# Stored, but not part of the text model or computed from the config.
_SKIPPED_END = (".rotary_emb.inv_freq",)
_SKIPPED_START = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)


def _is_skipped(config: Config, name: str) -> bool:
    """Whether a tensor is not the target's, multi-token prediction included."""
    start = (*_SKIPPED_START, *names.modules(config))
    return name.endswith(_SKIPPED_END) or name.startswith(start)


def _check(config: Config, source: Checkpoint, table: dict[str, names.Place]) -> None:
    missing = [name for name in table if name not in source.tensors]
    if missing:
        untied = " (tie_word_embeddings is false, so the head needs its own tensor)"
        hint = untied if missing == ["lm_head.weight"] else ""
        raise ValueError(f"{source.path} lacks tensor {_some(missing)}{hint}")
    extra = [
        name
        for name in source.tensors
        if name not in table and not _is_skipped(config, name)
    ]
    if config.tie_embeddings and "lm_head.weight" in extra:
        _check_tied(source)
        extra.remove("lm_head.weight")
    if extra:
        raise ValueError(
            f"{source.path} holds tensors that its config gives a {config.family} model "
            f"no place for: {_some(extra)}"
        )
    for name, place in table.items():
        if source.tensors[name] != place.shape:
            raise ValueError(
                f"{source.path}: tensor {name} has shape {source.tensors[name]}; the "
                f"config asks for {place.shape}"
            )


def _check_tied(source: Checkpoint) -> None:
    """A head stored beside a tied embedding must be its copy."""
    shape = source.tensors["lm_head.weight"]
    same = shape == source.tensors["model.embed_tokens.weight"]
    if same:
        head, embed = np.empty(shape, np.float32), np.empty(shape, np.float32)
        source.read("lm_head.weight", head)
        source.read("model.embed_tokens.weight", embed)
        same = np.array_equal(head, embed)
    if not same:
        raise ValueError(
            f"{source.path}: lm_head.weight differs from model.embed_tokens.weight, but "
            "the config says that they are tied; set tie_word_embeddings to false"
        )


def _some(keys: list[str]) -> str:
    rest = f" and {len(keys) - 4} more" if len(keys) > 4 else ""
    return ", ".join(keys[:4]) + rest
