"""A model -> a folder that transformers and ``jspec.load`` read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from jspec.models import names, tensorfile
from jspec.models.config import Config
from jspec.models.hf import config_to_hf
from jspec.models.load import Model
from jspec.models.transformer import Weights


def save(
    model: Model | tuple[Config, Weights], folder: str | Path, *, tokenizer: Any = None
) -> Path:
    """Writes ``config.json``, ``model.safetensors`` and the tokenizer's files.

    Weights keep their dtype: loading the folder with that dtype gives the same bits.

    Args:
      model: a ``Model``, or a config and its weights.
      folder: made if it is missing; files of the same names are replaced.
      tokenizer: a transformers tokenizer; None is the model's own.

    Returns:
      The folder.

    Raises:
      ValueError: the config is not one that transformers has, or the weights do not fit
        it.
    """
    if isinstance(model, Model):
        config, params = model.config, model.params
        tokenizer = model.tokenizer if tokenizer is None else tokenizer
    else:
        config, params = model
    folder = Path(folder)
    _check(config, params)
    hf = config_to_hf(config)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = np.dtype(params.embed.dtype)
    (folder / "config.json").write_text(
        json.dumps(hf | {"dtype": dtype.name}, indent=2) + "\n"
    )
    table = names.places(config)

    def tensor(name: str) -> np.ndarray:
        array = np.asarray(names.lookup(params, table[name].path))
        return array[table[name].index].reshape(table[name].shape)

    specs = {
        name: (p.shape, np.dtype(names.lookup(params, p.path).dtype))
        for name, p in table.items()
    }
    tensorfile.write(folder / "model.safetensors", specs, tensor)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def _check(config: Config, params: Weights) -> None:
    for path, shape in names.arrays(config).items():
        array = names.lookup(params, path)
        if array is None or array.shape != shape:
            found = None if array is None else array.shape
            raise ValueError(
                f"weights {'.'.join(map(str, path))} have shape {found}; the config asks "
                f"for {shape}"
            )
