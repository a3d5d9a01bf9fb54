"""The published layout of Medusa heads, read and written.

A folder with ``config.json`` (``medusa_num_heads``, ``medusa_num_layers``,
``base_model_name_or_path``) and one file of weights: ``{i}.{j}.linear.weight [M, M]`` and
``{i}.{j}.linear.bias [M]`` for the residual block ``j`` of head ``i``,
``{i}.{layers}.weight [V, M]`` for its vocabulary product. The blocks of a head share
their weights, which the file repeats for every ``j``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec import checks, tree
from jspec.drafters.heads import Medusa, MedusaHead, medusa
from jspec.drafters.loading import Draft
from jspec.models import Model, tensorfile
from jspec.tree import Topology

WEIGHTS = "medusa_lm_head.safetensors"
_SAFETENSORS = (WEIGHTS, "model.safetensors")
_TORCH = "medusa_lm_head.pt"


class _File(NamedTuple):
    """Tensors of a file: their shapes, and a function that reads one as float32."""

    path: Path
    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]


def load_medusa(
    folder: str | Path, target: Model, topology: Topology = tree.MEDUSA_63
) -> Draft:
    """Medusa heads of a folder in the published layout, ready to draft for ``target``.

    The file says how many heads there are, at least as many as the config does:
    published configs announce two where the file holds five.

    Args:
      folder: with ``config.json`` and ``medusa_lm_head.safetensors``,
        ``model.safetensors`` or, where torch is installed, ``medusa_lm_head.pt``.
      target: the model they were trained on; the heads take its dtype.
      topology: as in ``jspec.drafters.medusa``.

    Raises:
      FileNotFoundError: no config or no weights.
      ImportError: a ``.pt`` file without torch.
      ValueError: missing or unexpected tensors; heads of another width or vocabulary
        than the target's; residual blocks of a head that differ; a tree that is too
        deep for the heads.
    """
    folder = Path(folder)
    heads, layers = _sizes(folder / "config.json")
    file = _open(folder)
    heads = max(heads, *(_head_of(key) + 1 for key in file.shapes), 1)
    _check_keys(file, heads, layers)
    _check_shapes(file, heads, layers, target)
    _check_shared(file, heads, layers)

    def read(key: str) -> jax.Array:
        return jnp.asarray(file.read(key), target.dtype)

    weights = Medusa(
        tuple(
            MedusaHead(
                weight=read(f"{i}.0.linear.weight"),
                bias=read(f"{i}.0.linear.bias"),
                vocab=read(f"{i}.{layers}.weight"),
            )
            for i in range(heads)
        ),
        layers=layers,
    )
    size = target.config.vocab_size
    return Draft(medusa(weights, size, topology), weights, "medusa", size)


def save_medusa(weights: Medusa, folder: str | Path, *, base: str = "") -> Path:
    """Writes heads in the published layout; loading them gives the same bits.

    Args:
      weights: the heads.
      folder: made if it is missing; files of the same names are replaced.
      base: name of the target, for ``base_model_name_or_path``.

    Returns:
      The folder.

    Raises:
      ValueError: heads with a draft vocabulary, which the layout has no place for.
    """
    if weights.to_target is not None:
        raise ValueError(
            f"the heads have a draft vocabulary of {weights.to_target.shape[0]} tokens; "
            "Medusa's published layout has no place for one, so only heads over the "
            "whole vocabulary can be saved in it"
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for i, head in enumerate(weights.heads):
        for j in range(weights.layers):
            tensors[f"{i}.{j}.linear.weight"] = head.weight
            tensors[f"{i}.{j}.linear.bias"] = head.bias
        tensors[f"{i}.{weights.layers}.weight"] = head.vocab
    config = {
        "base_model_name_or_path": base,
        "medusa_num_heads": len(weights.heads),
        "medusa_num_layers": weights.layers,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    specs = {key: (x.shape, np.dtype(x.dtype)) for key, x in tensors.items()}
    tensorfile.write(folder / WEIGHTS, specs, lambda key: np.asarray(tensors[key]))
    return folder


def _sizes(file: Path) -> tuple[int, int]:
    """Number of heads and of residual blocks in each, as the config says."""
    if not file.is_file():
        raise FileNotFoundError(
            f"there is no config.json in {file.parent}; a folder of Medusa heads holds "
            f"config.json and {WEIGHTS}"
        )
    config = json.loads(file.read_text())
    absent = [k for k in ("medusa_num_heads", "medusa_num_layers") if k not in config]
    if absent:
        raise ValueError(f"{file} is no config of Medusa heads: it lacks {absent}")
    return (
        checks.count(f"{file}: medusa_num_heads", config["medusa_num_heads"], 1),
        checks.count(f"{file}: medusa_num_layers", config["medusa_num_layers"], 1),
    )


def _open(folder: Path) -> _File:
    for name in _SAFETENSORS:
        if (folder / name).is_file():
            return _open_safetensors(folder / name)
    if (folder / _TORCH).is_file():
        return _open_torch(folder / _TORCH)
    raise FileNotFoundError(
        f"{folder} holds none of {', '.join(_SAFETENSORS)} and {_TORCH}"
    )


def _open_safetensors(path: Path) -> _File:
    stored = tensorfile.index(path)

    def read(key: str) -> np.ndarray:
        out = np.empty(stored[key].shape, np.float32)
        tensorfile.read(key, stored[key], out)
        return out

    return _File(path, {key: s.shape for key, s in stored.items()}, read)


def _open_torch(path: Path) -> _File:
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"{path} is a PyTorch file and torch is not installed; convert it once, "
            f"where torch is, to {WEIGHTS} with safetensors.torch.save_file"
        ) from error
    tensors = torch.load(path, map_location="cpu", weights_only=True)
    return _File(
        path,
        {key: tuple(x.shape) for key, x in tensors.items()},
        lambda key: tensors[key].float().numpy(),
    )


def _head_of(key: str) -> int:
    """The head that a key belongs to, -1 if it is none of a head's."""
    first = key.split(".")[0]
    return int(first) if first.isdecimal() else -1


def _shapes(
    heads: int, layers: int, hidden: int, vocab: int
) -> dict[str, tuple[int, ...]]:
    """Every key of the layout and its shape."""
    table: dict[str, tuple[int, ...]] = {}
    for i in range(heads):
        for j in range(layers):
            table[f"{i}.{j}.linear.weight"] = (hidden, hidden)
            table[f"{i}.{j}.linear.bias"] = (hidden,)
        table[f"{i}.{layers}.weight"] = (vocab, hidden)
    return table


def _check_keys(file: _File, heads: int, layers: int) -> None:
    wanted = _shapes(heads, layers, 0, 0)
    missing = [key for key in wanted if key not in file.shapes]
    unexpected = [key for key in file.shapes if key not in wanted]
    if missing or unexpected:
        raise ValueError(
            f"{file.path} does not hold {heads} heads of {layers} layers: missing "
            f"{', '.join(missing) or 'nothing'}; unexpected "
            f"{', '.join(unexpected) or 'nothing'}"
        )


def _check_shapes(file: _File, heads: int, layers: int, target: Model) -> None:
    vocab, hidden = file.shapes[f"0.{layers}.weight"]
    config = target.config
    if (vocab, hidden) != (config.vocab_size, config.hidden):
        raise ValueError(
            f"{file.path} holds heads of width {hidden} for {vocab} tokens, but "
            f"{target.name} has width {config.hidden} and {config.vocab_size} tokens; "
            "heads draft for the model that they were trained on"
        )
    for key, shape in _shapes(heads, layers, hidden, vocab).items():
        if file.shapes[key] != shape:
            raise ValueError(
                f"{file.path}: tensor {key} has shape {file.shapes[key]}; the layout "
                f"asks for {shape}"
            )


def _check_shared(file: _File, heads: int, layers: int) -> None:
    for i in range(heads):
        for j in range(1, layers):
            for part in ("weight", "bias"):
                first, other = f"{i}.0.linear.{part}", f"{i}.{j}.linear.{part}"
                if not np.array_equal(file.read(first), file.read(other)):
                    raise ValueError(
                        f"{file.path}: {other} differs from {first}, but the residual "
                        "blocks of a Medusa head share their weights"
                    )
