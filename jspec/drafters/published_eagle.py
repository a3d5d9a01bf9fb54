"""EAGLE heads in the folders that others publish and read.

Three layouts: EAGLE-1/2 and EAGLE-3 as the authors and SpecForge write them, and EAGLE-3 and
P-EAGLE as the speculators library writes them. Which one a folder has is read off its config and keys.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jspec.drafters import eagle, tensors
from jspec.drafters.eagle import Design, Weights
from jspec.models import Model, names
from jspec.models.config import Config
from jspec.models.hf import config_from_hf, config_to_hf
from jspec.models.names import Place

OFFICIAL, SPECULATORS = "official", "speculators"


@dataclasses.dataclass(frozen=True)
class Head:
    """A head as a folder holds it.

    Attributes:
      design: static.  weights: its parameters, the target's embedding and head included.
      layout: ``OFFICIAL`` or ``SPECULATORS``.
    """

    design: Design
    weights: Weights
    layout: str = OFFICIAL


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
        design = _speculators_design(hf, target)
    elif any(name.startswith("midlayer.") for name in found):
        design = _official_design(hf, target)
    else:
        design = Design(_layers_config(hf), (-1,), eagle.eagle1, eagle.as_is)
    _check_target(folder, design, target, found)
    layout = SPECULATORS if speculators else OFFICIAL
    shapes, optional = _shapes(design, layout, found, target)
    kept = tensors.take(folder, found, shapes, optional)
    return Head(design, _weights(folder, design, layout, kept, target), layout)


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
    arrays = tensors.parts(_table(design, head.layout), weights)
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
    config = _config(head, vocab_size) | {"torch_dtype": jnp.dtype(dtype).name}
    folder = tensors.write(Path(folder), config, arrays)
    tensors.write_token_map(folder, None if own or ids is None else np.asarray(ids))
    return folder


def _feature_norms(norm) -> dict[str, np.ndarray]:
    if norm is None:
        return {}
    if norm.ndim == 1:
        return {"input_norm.weight": np.asarray(norm)}
    return {f"fc_norm.{i}.weight": np.asarray(part) for i, part in enumerate(norm)}


# --- configs ----------------------------------------------------------------------------


def _layers_config(hf: dict) -> Config:
    """The decoder layers of a head from its (or its ``transformer_layer_config``'s) dict."""
    own = {"model_type": "llama", "max_position_embeddings": 2048}
    return config_from_hf(own | {k: v for k, v in hf.items() if v is not None})


def default_taps(layers: int) -> tuple[int, ...]:
    """EAGLE-3's low, middle and high feature: what layers 2, n/2 and n - 3 receive."""
    return 2, layers // 2, layers - 3


def _official_design(hf: dict, target: Model) -> Design:
    ids = (hf.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    # These count what a layer receives; a list that begins with 1 counts outputs.
    if ids and ids[0] == 1:
        ids = [i + 1 for i in ids]
    taps = tuple(ids) if ids else default_taps(target.config.layers)
    return Design(_layers_config(hf), taps, eagle.eagle3, eagle.fuse)


def _speculators_design(hf: dict, target: Model) -> Design:
    ids, mask_id = hf.get("eagle_aux_hidden_state_layer_ids"), None
    if hf["speculators_model_type"] == "peagle":
        mask_id = hf.get("mask_token_id")
        vocab_size = target.config.vocab_size
        if mask_id is None or not 0 <= mask_id < vocab_size:
            raise ValueError(
                f"mask_token_id is {mask_id}; a P-EAGLE head needs one of "
                f"{target.name}'s {vocab_size} tokens"
            )
    return Design(
        _layers_config(hf["transformer_layer_config"]),
        tuple(ids) if ids else default_taps(target.config.layers),
        eagle.eagle3,
        eagle.fuse,
        norm_before_residual=bool(hf.get("norm_before_residual")),
        # The library's own P-EAGLE does not heed it either: nothing is fed back.
        norm_output=mask_id is None and bool(hf.get("norm_output")),
        mask_id=mask_id,
    )


def _config(head: Head, vocab_size: int) -> dict:
    design, draft_size = head.design, head.weights.head.shape[0]
    layers = config_to_hf(dataclasses.replace(design.config, tie_embeddings=False))
    layers["vocab_size"] = vocab_size
    if head.layout == SPECULATORS and design.first is eagle.eagle1:
        raise ValueError("the speculators layout has no place for an EAGLE-1 head")
    if head.layout == SPECULATORS:
        return _speculators_config(head, layers, draft_size)
    variants = design.norm_before_residual, design.norm_output, design.mask_id
    if any(x not in (False, None) for x in variants) or design.config.layers > 1:
        raise ValueError("the official layout has no place for this head's variants")
    if design.first is eagle.eagle1:
        return layers | {"bias": head.weights.fc_bias is not None}
    if head.weights.feature_norm is not None:
        raise ValueError("the official layout has no place for norms before fc")
    if design.taps[0] == 1:
        raise ValueError(
            f"features of layers {list(design.taps)}: readers of the official layout take "
            "a list that begins with 1 for one of layer outputs; use other layers"
        )
    aux = {
        "eagle_aux_hidden_state_layer_ids": list(design.taps),
        "use_aux_hidden_state": True,
    }
    return layers | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": draft_size,
        "eagle_config": aux,
    }


def _speculators_config(head: Head, layers: dict, draft_size: int) -> dict:
    design, norm = head.design, head.weights.feature_norm
    kind, name = "eagle3", "Eagle3DraftModel"
    own: dict = {"embed_requires_grad": False}
    if design.mask_id is not None:
        kind, name = "peagle", "PEagleDraftModel"
        own = {"embed_requires_grad": True, "mask_token_id": design.mask_id}
    library = tensors.speculators_config(kind, layers["architectures"], tokens=5)
    return (
        library
        | own
        | {
            "architectures": [name],
            "transformer_layer_config": layers,
            "draft_vocab_size": draft_size,
            "eagle_aux_hidden_state_layer_ids": list(design.taps),
            "target_hidden_size": None,
            "norm_before_residual": design.norm_before_residual,
            "norm_output": design.norm_output,
            "norm_before_fc": norm is not None and norm.ndim == 1,
            "fc_norm": norm is not None and norm.ndim == 2,
            "tie_word_embeddings": False,
        }
    )


# --- tensors ----------------------------------------------------------------------------


def _table(design: Design, layout: str) -> dict[str, Place]:
    """Key -> place in ``Weights`` of everything trained but fc, its norm and the head."""
    config, wide = design.config, design.first is eagle.eagle3
    width = config.hidden
    table: dict[str, Place] = {}
    for i in range(config.layers):
        prefix = f"layers.{i}."
        if wide and i == 0 and layout == OFFICIAL:
            prefix = "midlayer."
        for name, place in names.of_layer(config, i).items():
            if i == 0 and name == "input_layernorm.weight":
                continue  # EAGLE-1 has none, EAGLE-3's norms the embedding
            if i == 0 and wide and place.path[-1] == "qkv":
                shape, array = (
                    (*x[:-1], 2 * width) for x in (place.shape, place.array)
                )
                place = place._replace(shape=shape, array=array)
            table[f"{prefix}{name}"] = place
        if wide and i == 0:
            for name, field in _FIRST_NORMS.items():
                table[f"{prefix}{name}.weight"] = names.whole((field,), (width,))
    if wide:
        table["norm.weight"] = names.whole(("final_norm",), (width,))
    return table


_FIRST_NORMS = {"input_layernorm": "embed_norm", "hidden_norm": "hidden_norm"}


def _shapes(design: Design, layout: str, found: dict, target: Model):
    """Key -> shape of every tensor of the folder, and the keys that may be missing."""
    config, vocab = design.config, target.config.vocab_size
    width, tapped = config.hidden, target.config.hidden
    shapes = {key: place.shape for key, place in _table(design, layout).items()}
    shapes["embed_tokens.weight"] = (vocab, width)
    optional = {"embed_tokens.weight"}
    if design.first is eagle.eagle1:
        shapes["fc.weight"] = (width, 2 * width)
        if "fc.bias" in found:
            shapes["fc.bias"] = (width,)
        return shapes, frozenset(optional)
    features = len(design.taps) * tapped
    shapes["fc.weight"] = (width, features)
    if design.mask_id is not None:
        shapes["mask_hidden"] = (1, 1, features)
    if "input_norm.weight" in found:
        shapes["input_norm.weight"] = (features,)
    if "fc_norm.0.weight" in found:
        shapes |= {f"fc_norm.{i}.weight": (tapped,) for i in range(len(design.taps))}
    reduced = len(found["d2t"]) if "d2t" in found else vocab
    shapes["lm_head.weight"] = (reduced, width)
    if "d2t" in found:
        shapes |= {"d2t": (reduced,), "t2d": (vocab,)}
        optional |= {"t2d"}
    return shapes, frozenset(optional | {"lm_head.weight"})


def _weights(
    folder: Path, design: Design, layout: str, kept: dict, target: Model
) -> Weights:
    dtype = target.dtype
    wide = design.first is eagle.eagle3
    top = names.nested(tensors.fused(_table(design, layout), kept, dtype))
    layers = top.pop("layers")
    layers[0]["attn_norm"] = None

    def optional(key: str):
        return jnp.asarray(kept[key], dtype) if key in kept else None

    ids = None
    if not wide:
        ids = tensors.read_token_map(folder, target.config.vocab_size)
    elif "d2t" in kept:
        ids = tensors.draft_ids(
            folder, kept["d2t"], kept.get("t2d"), target.config.vocab_size
        )
    norm = optional("input_norm.weight")
    if "fc_norm.0.weight" in kept:
        every = [kept[f"fc_norm.{i}.weight"] for i in range(len(design.taps))]
        norm = jnp.asarray(np.stack(every), dtype)
    embed = optional("embed_tokens.weight")
    head = optional("lm_head.weight") if wide else None
    mask_hidden = optional("mask_hidden")
    return Weights(
        embed=target.params.embed if embed is None else embed,
        layers=tuple(names.layer_of(design.config, layers[i]) for i in sorted(layers)),
        head=target_head(target, ids) if head is None else head,
        fc=optional("fc.weight"),
        fc_bias=optional("fc.bias"),
        feature_norm=norm,
        to_target=None if ids is None else jnp.asarray(ids),
        mask_hidden=None if mask_hidden is None else mask_hidden[0, 0],
        **top,
    )


def target_head(target: Model, ids: np.ndarray | None = None):
    """The target's head ``[V, M]``, or its rows ``ids``."""
    head = target.params.embed if target.params.head is None else target.params.head
    return head if ids is None else head[jnp.asarray(ids)]


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
