"""Blockwise heads in a folder. Nobody publishes any, so the layout is our own.

``config.json``: ``model_type`` "blockwise", ``num_heads`` K, ``wide`` (hidden units a
head), ``hidden_size`` and ``vocab_size`` of the target. Tensors: ``up.weight [K * wide,
M]``, ``up.bias``, ``down.weight [K, M, K * wide]``, ``down.bias [K, M]`` and, for a draft
vocabulary, ``token_map [V']``. The vocabulary product is the target's and not stored.
"""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jspec import checks
from jspec.drafters import tensors
from jspec.drafters.heads import Blockwise
from jspec.drafters.tensors import target_head
from jspec.models import Model

_SIZES = ("num_heads", "wide", "hidden_size", "vocab_size")


def is_blockwise(config: dict) -> bool:
    """Does a ``config.json`` look like that of blockwise heads?"""
    return config.get("model_type") == "blockwise"


def read_blockwise(folder: str | Path, target: Model) -> Blockwise:
    """Blockwise heads of a folder, joined to the target's vocabulary product.

    Raises:
      FileNotFoundError: no config or no weights.
      ValueError: missing or unexpected tensors; heads for another target, naming both.
    """
    folder = Path(folder)
    config = tensors.read_config(folder)
    absent = [key for key in _SIZES if key not in config]
    if absent:
        raise ValueError(f"config.json in {folder} lacks {absent}")
    count, wide, width, vocab = (
        checks.count(f"{folder}: {key}", config[key], 1) for key in _SIZES
    )
    ours = target.config.hidden, target.config.vocab_size
    if (width, vocab) != ours:
        raise ValueError(
            f"{folder} was made for a target of width {width} with {vocab} tokens, but "
            f"{target.name} has width {ours[0]} and {ours[1]} tokens"
        )
    found = tensors.read_tensors(folder)
    shapes = {
        "up.weight": (count * wide, width),
        "up.bias": (count * wide,),
        "down.weight": (count, width, count * wide),
        "down.bias": (count, width),
    }
    ids = None
    if "token_map" in found:
        ids = tensors.target_ids(folder, "token_map", found["token_map"], vocab)
        shapes["token_map"] = ids.shape
    kept = tensors.take(folder, found, shapes)
    names = ("up.weight", "up.bias", "down.weight", "down.bias")
    return Blockwise(
        *(jnp.asarray(kept[name], target.dtype) for name in names),
        vocab=target_head(target, ids),
        to_target=None if ids is None else jnp.asarray(ids),
    )


def save_blockwise(
    weights: Blockwise, folder: str | Path, vocab_size: int, dtype=jnp.bfloat16
) -> Path:
    """Writes heads without the target's vocabulary product; returns the folder."""
    count, width, inner = weights.down.shape
    arrays = {
        "up.weight": weights.up,
        "up.bias": weights.up_bias,
        "down.weight": weights.down,
        "down.bias": weights.down_bias,
    }
    arrays = {key: np.asarray(jnp.asarray(x, dtype)) for key, x in arrays.items()}
    if weights.to_target is not None:
        arrays["token_map"] = np.asarray(weights.to_target, np.int64)
    sizes = count, inner // count, width, vocab_size
    config = {"model_type": "blockwise"} | dict(zip(_SIZES, sizes, strict=True))
    return tensors.write(Path(folder), config, arrays)
