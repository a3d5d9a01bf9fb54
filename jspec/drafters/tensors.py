"""Tensors of a published head by name: read whole, checked against a table, written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import safe_open

from jspec.models import Model, names, tensorfile
from jspec.models.load import weight_files
from jspec.models.names import Place

Wanted = Callable[[str], bool]
TOKEN_MAP = "token_map.safetensors"
_IGNORED_END = ("rotary_emb.inv_freq",)


def read_config(folder: Path) -> dict:
    """``config.json`` of a head.

    Raises:
      FileNotFoundError: there is none.  ValueError: it is not JSON.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"there is no config.json in {folder}; is it a head?")
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON ({error})") from error


def read_tensors(
    folder: Path,
    wanted: Wanted = lambda name: True,
    own: str | None = None,
    pickled: str = "pytorch_model.bin",
) -> dict:
    """The tensors of a folder whose names are ``wanted``.

    They lie in the safetensors file ``own``, in ``model.safetensors`` or its parts, or in
    the torch file ``pickled``. Floats come as float32, the rest as stored. Heads are
    small: they are read whole.

    Raises:
      FileNotFoundError: none of the files is there.
      ImportError: only the torch file is there, and torch is not.
      ValueError: a damaged file.
    """
    if own and (folder / own).is_file():
        return _safetensors(folder / own, wanted)
    if (folder / "model.safetensors").is_file() or not (folder / pickled).is_file():
        files = weight_files(folder)
        return {k: x for file in files for k, x in _safetensors(file, wanted).items()}
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"{folder / pickled} is a PyTorch file and torch is not installed; install "
            "it, or convert the file to model.safetensors where it is"
        ) from error
    state = torch.load(folder / pickled, map_location="cpu", weights_only=True)
    return {
        name: (t.float() if t.is_floating_point() else t).numpy()
        for name, t in state.items()
        if wanted(name)
    }


def _safetensors(file: Path, wanted: Wanted) -> dict[str, np.ndarray]:
    found = {}
    for name, stored in tensorfile.index(file).items():
        if not wanted(name):
            continue
        if stored.dtype.startswith(("F", "BF")):
            found[name] = np.empty(stored.shape, np.float32)
            tensorfile.read(name, stored, found[name])
        else:  # id maps
            with safe_open(file, "np") as opened:
                found[name] = opened.get_tensor(name)
    return found


def take(
    folder: Path,
    tensors: dict[str, np.ndarray],
    shapes: dict[str, tuple[int, ...]],
    optional: frozenset[str] = frozenset(),
) -> dict[str, np.ndarray]:
    """The tensors that ``shapes`` asks for; none missing, none left over, all of its shape.

    Raises:
      ValueError: listing every key that is missing, unexpected or of another shape.
    """
    missing = sorted(shapes.keys() - tensors.keys() - optional)
    extra = sorted(
        name
        for name in tensors.keys() - shapes.keys()
        if not name.endswith(_IGNORED_END)
    )
    if missing or extra:
        raise ValueError(
            f"{folder} does not hold the tensors its config asks for; missing: "
            f"{', '.join(missing) or 'none'}; unexpected: {', '.join(extra) or 'none'}"
        )
    wrong = [
        f"{name} is {tensors[name].shape}, the config asks for {shape}"
        for name, shape in shapes.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if wrong:
        raise ValueError(f"{folder}: {'; '.join(wrong)}")
    return {name: tensors[name] for name in shapes if name in tensors}


def fused(table: dict[str, Place], kept: dict[str, np.ndarray], dtype) -> dict:
    """The arrays that ``table`` puts the tensors ``kept`` into, by path, on the device.

    Some stay float32, see ``names.dtype_of``.
    """
    host: dict[names.Path, np.ndarray] = {}
    for key, place in table.items():
        if place.path not in host:
            host[place.path] = np.empty(place.array, np.float32)
        view = host[place.path][place.index]
        host[place.path][place.index] = kept[key].reshape(view.shape)

    return {
        path: jnp.asarray(a, names.dtype_of(path, dtype)) for path, a in host.items()
    }


def parts(table: dict[str, Place], weights) -> dict[str, np.ndarray]:
    """The tensors of ``table`` out of the arrays of ``weights``."""
    arrays = {p.path: np.asarray(names.lookup(weights, p.path)) for p in table.values()}
    return {
        key: arrays[place.path][place.index].reshape(place.shape)
        for key, place in table.items()
    }


def draft_ids(
    folder: Path, d2t: np.ndarray, t2d: np.ndarray | None, vocab_size: int
) -> np.ndarray:
    """Target ids ``[V']`` of a reduced vocabulary; ``d2t`` holds offsets to draft ids.

    Raises:
      ValueError: ids outside the target's vocabulary, or maps that contradict each other.
    """
    ids = target_ids(
        folder, "d2t", np.arange(len(d2t)) + d2t.astype(np.int64), vocab_size
    )
    if t2d is not None and not np.array_equal(np.flatnonzero(t2d), np.sort(ids)):
        raise ValueError(f"{folder}: t2d and d2t name different target ids")
    return ids


def target_ids(folder: Path, name: str, ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """``ids`` as int32, if they are different tokens of the target.

    Raises:
      ValueError: they are not; ``name`` is the tensor they come from.
    """
    if ids.min() < 0 or ids.max() >= vocab_size or len(set(ids.tolist())) != len(ids):
        raise ValueError(
            f"{folder}: {name} does not name {len(ids)} different ids below "
            f"{vocab_size}"
        )
    return ids.astype(np.int32)


def target_head(target: Model, ids: np.ndarray | None = None):
    """The target's head ``[V, M]``, or its rows ``ids``."""
    head = target.params.embed if target.params.head is None else target.params.head
    return head if ids is None else head[jnp.asarray(ids)]


def read_token_map(folder: Path, vocab_size: int) -> np.ndarray | None:
    """Target ids ``[V']`` that a head drafts which has no head of its own, or None: all.

    They lie in a file beside the head, which other readers pass over: the layouts of
    heads that share the target's have no place for them. Source: Zhao et al. 2502.14856
    (FR-Spec), the most frequent tokens.

    Raises:
      ValueError: a damaged file, or ids that are not the target's.
    """
    file = folder / TOKEN_MAP
    if not file.is_file():
        return None
    found = _safetensors(file, lambda name: True)
    if set(found) != {"ids"} or found["ids"].ndim != 1:
        raise ValueError(f"{file} holds {sorted(found)}; it needs one array, ids [V']")
    return target_ids(folder, TOKEN_MAP, found["ids"], vocab_size)


def write_token_map(folder: Path, ids: np.ndarray | None) -> None:
    """Writes the ids of ``read_token_map``; without any, none are left there."""
    file = folder / TOKEN_MAP
    file.unlink(missing_ok=True)
    if ids is not None:
        ids = np.asarray(ids, np.int64)
        tensorfile.write(file, {"ids": (ids.shape, ids.dtype)}, lambda name: ids)


def id_maps(ids: np.ndarray, vocab_size: int) -> dict[str, np.ndarray]:
    """``d2t`` and ``t2d`` of the target ids of a reduced vocabulary, which must ascend.

    Raises:
      ValueError: ids that do not ascend.
    """
    ids = np.asarray(ids, np.int64)
    if np.any(np.diff(ids) <= 0):
        raise ValueError("target ids of a draft vocabulary must ascend")
    return {
        "d2t": ids - np.arange(len(ids)),
        "t2d": np.isin(np.arange(vocab_size), ids),
    }


def speculators_config(
    algorithm: str, architectures: list[str], tokens: int
) -> dict[str, Any]:
    """What the speculators library keeps of a head beside its architecture.

    Args:
      algorithm: the library's name of the drafter.
      architectures: of the target.
      tokens: drafted by default.
    """
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "speculators_model_type": algorithm,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": None, "architectures": architectures},
        },
    }


def write(
    folder: Path,
    config: dict,
    tensors: dict[str, np.ndarray],
    file: str = "model.safetensors",
) -> Path:
    """Writes ``config.json`` and the weights; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    specs = {name: (t.shape, t.dtype) for name, t in tensors.items()}
    tensorfile.write(folder / file, specs, lambda name: tensors[name])
    return folder
