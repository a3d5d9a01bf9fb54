"""EAGLE heads in the folders that others publish and read.

Three layouts: EAGLE-1/2 and EAGLE-3 as the authors and SpecForge write them, and EAGLE-3 and
P-EAGLE as the speculators library writes them. Which one a folder has is read off its config and keys.
"""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jspec.drafters import eagle, tensors
from jspec.drafters.eagle import Design
from jspec.drafters.eagle_configs import (
    OFFICIAL,
    SPECULATORS,
    Head,
    config_of,
    layers_config,
    official_design,
    speculators_design,
)
from jspec.drafters.eagle_tensors import shapes_of, table, weights_of
from jspec.models import Model


def is_eagle(config: dict) -> bool:
    """Does a ``config.json`` look like that of an EAGLE head?"""
    if "speculators_model_type" in config:
        return config["speculators_model_type"] in ("eagle3", "peagle")
    eagle3 = "LlamaForCausalLMEagle3" in (config.get("architectures") or [])
    # An EAGLE-1 config is a Llama config of one layer; the flag is what tells it apart.
    return eagle3 or "draft_vocab_size" in config or "bias" in config


def load_eagle(folder: str | Path, target: Model) -> Head:
    """Reads a head and joins it to its target.

    Args:
      folder: holds ``config.json`` and ``model.safetensors`` (or ``pytorch_model.bin``).
      target: gives the embedding and the head where the folder has none.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: keys missing, left over or of another shape; a head for a target of
        another width, vocabulary or depth. The message names both sides.
    """
    folder = Path(folder)
    hf, found = tensors.read_config(folder), tensors.read_tensors(folder)
    speculators = "speculators_model_type" in hf
    if speculators:
        design = speculators_design(hf, target)
    elif any(name.startswith("midlayer.") for name in found):
        design = official_design(hf, target)
    else:
        design = Design(layers_config(hf), (-1,), eagle.eagle1, eagle.as_is)
    _check_target(folder, design, target, found)
    layout = SPECULATORS if speculators else OFFICIAL
    shapes, optional = shapes_of(design, layout, found, target)
    kept = tensors.take(folder, found, shapes, optional)
    return Head(design, weights_of(folder, design, layout, kept, target), layout)


def save_eagle(
    head: Head, folder: str | Path, dtype=jnp.bfloat16, *, embedding: bool = False
) -> Path:
    """Writes a head in its layout.

    Args:
      head: what to write; its ``layout`` may be replaced before.
      folder: made if it is missing.
      dtype: of the floats.
      embedding: write the embedding too. EAGLE's own loader of version 1 wants it; others,
        jspec among them, take the target's. The speculators layout always has it.

    Raises:
      ValueError: a layout that cannot say what the head is.
    """
    design, weights = head.design, head.weights
    arrays = tensors.parts(table(design, head.layout), weights)
    if design.first is eagle.eagle3:
        arrays["lm_head.weight"] = np.asarray(weights.head)
    if embedding or head.layout == SPECULATORS:
        arrays["embed_tokens.weight"] = np.asarray(weights.embed)
    if weights.fc is not None:
        arrays["fc.weight"] = np.asarray(weights.fc)
    if weights.fc_bias is not None:
        arrays["fc.bias"] = np.asarray(weights.fc_bias)
    if weights.mask_hidden is not None:
        arrays["mask_hidden"] = np.asarray(weights.mask_hidden)[None, None]
    arrays |= _feature_norms(weights.feature_norm)
    arrays = {key: np.asarray(jnp.asarray(a, dtype)) for key, a in arrays.items()}
    vocab_size, ids = weights.embed.shape[0], weights.to_target
    own = design.first is eagle.eagle3
    if ids is not None and own:
        arrays |= tensors.id_maps(np.asarray(ids), vocab_size)
    config = config_of(head, vocab_size) | {"torch_dtype": jnp.dtype(dtype).name}
    folder = tensors.write(Path(folder), config, arrays)
    tensors.write_token_map(folder, None if own or ids is None else np.asarray(ids))
    return folder


def _feature_norms(norm) -> dict[str, np.ndarray]:
    if norm is None:
        return {}
    if norm.ndim == 1:
        return {"input_norm.weight": np.asarray(norm)}
    return {f"fc_norm.{i}.weight": np.asarray(part) for i, part in enumerate(norm)}


def _check_target(folder: Path, design: Design, target: Model, found: dict) -> None:
    """Refuses a head that was made for another target, naming both sides."""
    ours, theirs = design.config, target.config
    if ours.vocab_size != theirs.vocab_size:
        raise ValueError(
            f"{folder} was made for a target with {ours.vocab_size} tokens, but "
            f"{target.name} has {theirs.vocab_size}"
        )
    deep = [t for t in design.taps if t > theirs.layers]
    if deep:
        raise ValueError(
            f"{folder} reads features of layers {deep}, but {target.name} has "
            f"{theirs.layers} layers"
        )
    fc = found.get("fc.weight")
    if fc is None:
        return
    wide = design.first is eagle.eagle3
    asked = len(design.taps) * theirs.hidden if wide else ours.hidden + theirs.hidden
    if fc.ndim == 2 and fc.shape[1] != asked:
        raise ValueError(
            f"{folder}: fc.weight reads {fc.shape[1]} numbers, but {target.name} "
            f"(width {theirs.hidden}, {len(design.taps)} features) gives {asked}"
        )
