"""Tensors of an EAGLE head by key, in the layouts that others publish."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jspec.drafters import eagle, tensors
from jspec.drafters.eagle import Design, Weights
from jspec.drafters.eagle_configs import OFFICIAL
from jspec.models import Model, names
from jspec.models.names import Place


def table(design: Design, layout: str) -> dict[str, Place]:
    """Key -> place in ``Weights`` of everything trained but fc, its norm and the head."""
    config, wide = design.config, design.first is eagle.eagle3
    width = config.hidden
    out: dict[str, Place] = {}
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
            out[f"{prefix}{name}"] = place
        if wide and i == 0:
            for name, field in _FIRST_NORMS.items():
                out[f"{prefix}{name}.weight"] = names.whole((field,), (width,))
    if wide:
        out["norm.weight"] = names.whole(("final_norm",), (width,))
    return out


_FIRST_NORMS = {"input_layernorm": "embed_norm", "hidden_norm": "hidden_norm"}


def shapes_of(design: Design, layout: str, found: dict, target: Model):
    """Key -> shape of every tensor of the folder, and the keys that may be missing."""
    config, vocab = design.config, target.config.vocab_size
    width, tapped = config.hidden, target.config.hidden
    shapes = {key: place.shape for key, place in table(design, layout).items()}
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


def weights_of(
    folder: Path, design: Design, layout: str, kept: dict, target: Model
) -> Weights:
    """``Weights`` from the tensors ``kept``; the target gives what the folder has not."""
    dtype = target.dtype
    wide = design.first is eagle.eagle3
    top = names.nested(tensors.fused(table(design, layout), kept, dtype))
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
        head=tensors.target_head(target, ids) if head is None else head,
        fc=optional("fc.weight"),
        fc_bias=optional("fc.bias"),
        feature_norm=norm,
        to_target=None if ids is None else jnp.asarray(ids),
        mask_hidden=None if mask_hidden is None else mask_hidden[0, 0],
        **top,
    )
