"""A name -> a model: alias, Hub id, folder, ``.safetensors`` or ``.gguf`` file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jspec.models import aliases, gguf, gguf_meta, names, tensorfile
from jspec.models.config import Config
from jspec.models.hf import config_from_hf
from jspec.models.transformer import Weights, target
from jspec.types import Target


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A loaded model.

    Attributes:
      name: what it was loaded as.
      target: its pure functions.  params: its weights, of dtype ``dtype``.
      tokenizer: a transformers tokenizer, or None when the files hold none.
    """

    name: str
    target: Target
    params: Weights
    tokenizer: Any
    dtype: Any

    @property
    def config(self) -> Config:
        return self.target.config


def load(name: str, *, dtype=None, revision: str | None = None) -> Model:
    """Loads a model. No torch is needed.

    Args:
      name: an alias (``smollm2-135m``, ``gemma3-270m``), a folder with ``config.json``
        and safetensors, a ``.safetensors`` or ``.gguf`` file, or a Hub id.
      dtype: of the weights; None is float32 on CPU and bfloat16 elsewhere.
      revision: branch, tag or commit of a Hub id.

    Raises:
      FileNotFoundError: a file, or an alias's package, is missing.
      ValueError: a file is damaged, a tensor is missing, left over or of the wrong
        shape, or the model is not supported; the message names it.
      ConnectionError: the Hub cannot be reached.
    """
    dtype = _dtype(dtype)
    path = aliases.folder(name) if name in aliases.ALIASES else Path(name).expanduser()
    if path.suffix == ".gguf":
        return _load_gguf(name, path, dtype)
    return _load_folder(name, path, dtype)


class Checkpoint(Protocol):
    """A source of tensors under transformers' names."""

    path: Path
    tensors: dict[str, tuple[int, ...]]

    def read(self, name: str, out: np.ndarray) -> None: ...


class _Safetensors:
    """One or several safetensors files."""

    def __init__(self, path: Path, files: list[Path]):
        self.path = path
        self._stored: dict[str, tensorfile.Stored] = {}
        for file in files:
            self._stored |= tensorfile.index(file)
        self.tensors = {_text_name(k): s.shape for k, s in self._stored.items()}
        self._raw = {_text_name(k): k for k in self._stored}

    def read(self, name: str, out: np.ndarray) -> None:
        raw = self._raw[name]
        tensorfile.read(raw, self._stored[raw], out)


def _text_name(key: str) -> str:
    """The text model's own name of a tensor of a multimodal wrapper."""
    for prefix in ("model.language_model.", "language_model.model."):
        if key.startswith(prefix):
            return "model." + key.removeprefix(prefix)
    return key.removeprefix("language_model.")


def build(config: Config, source: Checkpoint, dtype) -> Weights:
    """The weights of ``source``, read tensor by tensor.

    Peak host memory is the weights and one fused array.

    Raises:
      ValueError: tensors that are missing, left over or of the wrong shape.
    """
    table = names.places(config)
    _check(config, source, table)
    by_array: dict[names.Path, list[str]] = {}
    for name, place in table.items():
        by_array.setdefault(place.path, []).append(name)
    parts = {}
    # The largest array first, while there is still room for its copy.
    shapes = sorted(names.arrays(config).items(), key=lambda x: -np.prod(x[1]))
    for path, shape in shapes:
        host = _aligned(shape, np.dtype(dtype))
        for name in by_array[path]:
            source.read(name, host[table[name].index])
        parts[path] = jax.device_put(host)
    return names.assemble(config, parts)


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Host memory that a CPU device can take over without a copy (64-byte aligned)."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


_IGNORED = (
    ".rotary_emb.inv_freq",  # computed, stored by old checkpoints
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)


def _check(config: Config, source: Checkpoint, table: dict[str, names.Place]) -> None:
    missing = [n for n in table if n not in source.tensors]
    if missing:
        hint = ""
        if missing == ["lm_head.weight"]:
            hint = " (tie_word_embeddings is false, so the head needs its own tensor)"
        raise ValueError(f"{source.path} lacks {_list(missing)}{hint}")
    extra = [n for n in source.tensors if n not in table and not _ignored(n)]
    if config.tie_embeddings and "lm_head.weight" in extra:
        _check_tied(source)
        extra.remove("lm_head.weight")
    if extra:
        raise ValueError(
            f"{source.path} holds tensors that a {config.family} model of this config "
            f"has no place for: {_list(extra)}"
        )
    for name, place in table.items():
        if source.tensors[name] != place.shape:
            raise ValueError(
                f"{source.path}: tensor {name} has shape {source.tensors[name]}; the "
                f"config asks for {place.shape}"
            )


def _ignored(name: str) -> bool:
    return name.endswith(_IGNORED[0]) or name.startswith(_IGNORED[1:])


def _check_tied(source: Checkpoint) -> None:
    shape = source.tensors["lm_head.weight"]
    same = shape == source.tensors["model.embed_tokens.weight"]
    if same:
        head, embed = np.empty(shape, np.float32), np.empty(shape, np.float32)
        source.read("lm_head.weight", head)
        source.read("model.embed_tokens.weight", embed)
        same = np.array_equal(head, embed)
    if not same:
        raise ValueError(
            f"{source.path}: lm_head.weight differs from model.embed_tokens.weight but "
            "the config says that they are tied; set tie_word_embeddings to false"
        )


def _list(keys: list[str]) -> str:
    return ", ".join(keys[:4]) + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")


def _load_gguf(name: str, path: Path, dtype) -> Model:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    file = gguf.File(path)
    config = config_from_hf(file.config)
    params = build(config, file, dtype)
    return Model(name, target(config), params, gguf_meta.tokenizer(file.metadata), dtype)


def _load_folder(name: str, folder: Path, dtype) -> Model:
    config = config_from_hf(_config_dict(folder))
    params = build(config, _Safetensors(folder, _shards(folder)), dtype)
    return Model(name, target(config), params, _tokenizer(folder), dtype)


def _config_dict(folder: Path) -> dict:
    hf = _json(folder / "config.json")
    generation = folder / "generation_config.json"
    if generation.is_file():
        eos = _json(generation).get("eos_token_id")
        hf |= {} if eos is None else {"eos_token_id": eos}
    return hf


def _json(file: Path) -> dict:
    if not file.is_file():
        raise FileNotFoundError(f"there is no {file.name} in {file.parent}")
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error


def _shards(folder: Path) -> list[Path]:
    return [folder / "model.safetensors"]


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def _dtype(dtype) -> Any:
    if dtype is None:
        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    return jnp.dtype(dtype)
