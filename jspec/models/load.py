"""A name -> a model: alias, Hub id, folder, ``.safetensors`` or ``.gguf`` file."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jspec.models import aliases, gguf, gguf_meta
from jspec.models.architecture import target
from jspec.models.config import Config
from jspec.models.hf import config_from_hf
from jspec.models.transformer import Weights
from jspec.models.weights import Safetensors, build
from jspec.types import Target

_DTYPES = ("float32", "bfloat16", "float16")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")  # one class, two names
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt"]
_PICKLED_FILES = ["*.bin", "*.pt"]


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A loaded model.

    Attributes:
      name: what it was loaded as.
      target: its pure functions.
      params: its weights, of dtype ``dtype`` (routers of experts stay float32,
        and norms on a CPU).
      tokenizer: a transformers tokenizer, or None when the files hold none.
    """

    name: str
    target: Target
    params: Weights
    tokenizer: Any
    dtype: Any

    @property
    def cache_dtype(self) -> Any:
        """Of keys and values: ``dtype``, but float32 on a CPU, which would convert all of a
        narrower cache to read or to write a part of it."""
        return jnp.dtype(jnp.float32) if jax.default_backend() == "cpu" else self.dtype

    @property
    def config(self) -> Config:
        """Sizes, windows and special ids: ``target.config``."""
        return self.target.config


def load(name: str | Path, *, dtype=None, revision: str | None = None) -> Model:
    """Loads a model; torch is not needed.

    ``Config.vocab_size`` is the number of embedding rows, as in transformers, also
    where the tokenizer knows fewer ids: the rows in excess are part of the model's law.
    EOS ids are those of ``generation_config.json``, else of ``config.json``.

    Args:
      name: an alias (``smollm2-135m``, ``gemma3-270m``), a folder with ``config.json``
        and safetensors, a ``.safetensors`` file with ``config.json`` beside it, a
        ``.gguf`` file, or a Hub id.
      dtype: of the weights: float32, bfloat16 or float16. None is float32 on CPU and
        bfloat16 on accelerators. On a CPU with AMX bfloat16 takes half the memory, and
        scoring several tokens hardly longer than one.
      revision: branch, tag or commit of a Hub id.

    Raises:
      FileNotFoundError: a file, or the package of an alias, is missing.
      ValueError: a file is damaged; a tensor is missing, left over or of the wrong
        shape; or the model is not supported. The message names it.
      ConnectionError: the Hub gives no such model or cannot be reached.
    """
    dtype = _dtype(dtype)
    name, path = str(name), fetch(str(name), revision)
    if path.suffix == ".gguf":
        return _from_gguf(name, path, dtype)
    if path.suffix == ".safetensors":
        return _from_files(name, path.parent, [path], dtype)
    return _from_files(name, path, weight_files(path), dtype)


def _dtype(dtype) -> Any:
    if dtype is None:
        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    dtype = jnp.dtype(dtype)
    if dtype.name not in _DTYPES:
        raise ValueError(f"dtype {dtype.name} is not one of {', '.join(_DTYPES)}")
    return dtype


def fetch(name: str, revision: str | None = None, *, pickled: bool = False) -> Path:
    """The folder or file that a name stands for, fetched or converted if need be.

    Args:
      name, revision: as for ``load``.
      pickled: fetch PyTorch files from the Hub where it has no safetensors.

    Raises:
      FileNotFoundError, ValueError, ConnectionError: as ``load``.
    """
    path = Path(name).expanduser()
    known = name in aliases.ALIASES
    is_file = path.suffix in (".gguf", ".safetensors")
    hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not is_file
    if revision is not None and (known or path.exists() or not hub_id):
        raise ValueError(f"revision = {revision!r} needs a Hub id, but got {name!r}")
    if known:
        return aliases.folder(name)
    if path.exists():
        if path.is_file() and not is_file:
            raise ValueError(f"{path} is neither a .safetensors nor a .gguf file")
        return path
    if hub_id:
        return _from_hub(name, revision, pickled)
    raise FileNotFoundError(
        f"there is no {name!r}: not an alias ({', '.join(aliases.ALIASES)}), not a "
        "folder or file, and not of the form of a Hub id (owner/name)"
    )


def _from_hub(name: str, revision: str | None, pickled: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    def snapshot(patterns: list[str]) -> Path:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))

    try:
        folder = snapshot(_HUB_FILES)
        if pickled and not any(folder.glob("*.safetensors")):
            folder = snapshot([*_HUB_FILES, *_PICKLED_FILES])
    except (OSError, HfHubHTTPError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConnectionError(
            f"there is no folder {name!r}, and the Hugging Face Hub does not give a "
            f"model of that id ({reason}). Check the id and the connection, or pass a "
            f"folder, a .gguf file or one of {', '.join(aliases.ALIASES)}"
        ) from error
    return folder


def _from_gguf(name: str, path: Path, dtype) -> Model:
    file = gguf.File(path)
    config = config_from_hf(file.config)
    # First, so that what building it takes is free again when the weights come.
    tokenizer = gguf_meta.tokenizer(file.metadata)
    file.metadata.clear()
    weights = build(config, file, dtype)
    return Model(name, target(config), weights, tokenizer, dtype)


def _from_files(name: str, folder: Path, files: list[Path], dtype) -> Model:
    config = config_from_hf(_config(folder))
    source = Safetensors(files[0] if len(files) == 1 else folder, files)
    tokenizer = _tokenizer(folder)
    weights = build(config, source, dtype)
    return Model(name, target(config), weights, tokenizer, dtype)


def _config(folder: Path) -> dict:
    hf = _json(folder / "config.json")
    generation = folder / "generation_config.json"
    if generation.is_file():
        eos = _json(generation).get("eos_token_id")
        hf |= {} if eos is None else {"eos_token_id": eos}
    return hf


def _json(file: Path) -> dict:
    if not file.is_file():
        raise FileNotFoundError(
            f"there is no {file.name} in {file.parent}; a model folder holds "
            "config.json and model.safetensors"
        )
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON ({error})") from error


def weight_files(folder: Path) -> list[Path]:
    """``model.safetensors``, or the shards of ``model.safetensors.index.json``."""
    single = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        shards = sorted(set(_json(index)["weight_map"].values()))
        for shard in shards:
            if not (folder / shard).is_file():
                raise FileNotFoundError(
                    f"{index} names the shard {shard}, which is missing; fetch it again"
                )
        return [folder / shard for shard in shards]
    found = ", ".join(sorted(f.name for f in folder.iterdir())) or "nothing"
    raise FileNotFoundError(
        f"there is no model.safetensors in {folder} (it holds {found}); other weight "
        "formats must be saved as safetensors first, a .gguf file is named itself"
    )


def _tokenizer(folder: Path) -> Any:
    if not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        return None
    # Imported late: transformers takes seconds, and ids alone need no tokenizer. The
    # class that most folders name is imported by itself, three times faster than all.
    settings = folder / "tokenizer_config.json"
    named = _json(settings).get("tokenizer_class") if settings.is_file() else None
    if named in _GENERIC and (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(folder)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)
