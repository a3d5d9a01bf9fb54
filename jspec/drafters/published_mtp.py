"""Prediction modules in the folders that others publish and read.

A target's own checkpoint holds them beside the target (DeepSeek-V3, GLM-4.5, Qwen3-Next,
Qwen3.5, MiMo); the speculators library keeps a module in a folder of its own. Embedding
and head are the target's in all of them, and copies that a folder holds are not read.
Modules read the target's hidden state after its last norm, as servers feed them; one that
was trained on the state before it has ``(layers,)`` for the taps of its design.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jspec.drafters import mtp, tensors
from jspec.drafters.eagle import Design, Weights
from jspec.drafters.tensors import target_head
from jspec.models import Model, names
from jspec.models.config import Config
from jspec.models.hf import config_from_hf, config_to_hf
from jspec.models.hf_experts import need
from jspec.models.hf_families import GATED, mtp_layers
from jspec.models.names import Place


@dataclasses.dataclass(frozen=True)
class Modules:
    """Prediction modules and what they share with their target.

    Attributes:
      design: static, of each of them.
      weights: one per module, in the order of depths.
    """

    design: Design
    weights: tuple[Weights, ...]

    @property
    def params(self) -> Weights | tuple[Weights, ...]:
        """The params of ``mtp.drafter(design, grower, len(weights))``."""
        return self.weights[0] if len(self.weights) == 1 else self.weights


class Layout(NamedTuple):
    """How a folder names a module's tensors.

    Attributes:
      top: ``(target layers, module) -> prefix`` of what the module has besides its layer.
      layer: the same, of its layer.
      names: what the folder calls embedding norm, hidden norm, fc and final norm.
      first: the order of the halves that fc reads.
    """

    top: Callable[[int, int], str]
    layer: Callable[[int, int], str]
    names: tuple[str, str, str, str]
    first: Callable = mtp.embedding_first


def _behind(layers: int, module: int) -> str:
    return f"model.layers.{layers + module}."


_MIMO_NAMES = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
BEHIND = Layout(_behind, _behind, ("enorm", "hnorm", "eh_proj", "shared_head.norm"))
QWEN = Layout(
    lambda _, module: "mtp.",
    lambda _, module: f"mtp.layers.{module}.",
    ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
)
MIMO = Layout(
    lambda _, module: f"model.mtp_layers.{module}.",
    lambda _, module: f"model.mtp_layers.{module}.",
    _MIMO_NAMES,
    mtp.hidden_first,
)
SPECULATORS = Layout(
    lambda _, module: f"mtp_layers.{module}.",
    lambda _, module: f"mtp_layers.{module}.",
    _MIMO_NAMES,
)
# Copies of what is the target's.
_COPIES = re.compile(
    r"(.*\.)?(embed_tokens|shared_head\.head|lm_head|verifier_lm_head|verifier_norm)"
    r"\.weight"
)
_FIELDS = ("embed_norm", "hidden_norm", "fc", "final_norm")


def is_mtp(config: dict) -> bool:
    """Does a ``config.json`` say that there are prediction modules in its folder?"""
    if "speculators_model_type" in config:
        return config["speculators_model_type"] == "mtp"
    text = _text(config)
    return "model_type" in text and mtp_layers(text) > 0


def load_mtp(folder: str | Path, target: Model) -> Modules:
    """Reads the prediction modules of a folder and joins them to their target.

    Args:
      folder: of the speculators library, or the target's own checkpoint.
      target: gives embedding and head.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: no modules; keys missing, left over or of another shape; modules for a
        target of another width or vocabulary. The message names both sides.
    """
    folder = Path(folder)
    hf = tensors.read_config(folder)
    if "speculators_model_type" in hf:
        layout, count, depth = SPECULATORS, hf.get("num_nextn_predict_layers", 1), 0
        hf = {"model_type": "qwen2"} | (hf.get("transformer_layer_config") or {})
    else:
        hf = _text(hf)
        layout, count = _own_layout(folder, hf)
        depth = need(hf, "num_hidden_layers")
    design = mtp.design_of(_layer_config(hf), layout.first)
    _check_target(folder, design, target)
    places = [_places(design, layout, depth, module) for module in range(count)]
    starts = _prefixes(layout, depth, count)
    found = tensors.read_tensors(
        folder, lambda key: key.startswith(starts) and not _COPIES.fullmatch(key)
    )
    if not any(".mlp.experts.0." in key for key in found):
        places = [_fused_experts(table) for table in places]
    shapes = {key: place.shape for table in places for key, place in table.items()}
    kept = tensors.take(folder, found, shapes)
    ids = tensors.read_token_map(folder, target.config.vocab_size)
    if ids is not None and count > 1:
        raise ValueError(f"{folder}: only a single module can have a token map")
    weights = tuple(_weights(design, table, kept, target, ids) for table in places)
    return Modules(design, weights)


def save_mtp(modules: Modules, folder: str | Path, dtype=jnp.bfloat16) -> Path:
    """Writes a module as the speculators library does, without what is the target's.

    Raises:
      ValueError: several modules, for which the library has no place.
    """
    if len(modules.weights) != 1:
        raise ValueError(
            f"{len(modules.weights)} modules; a folder of the speculators library holds "
            "one"
        )
    design, weights = modules.design, modules.weights[0]
    table = _fused_experts(_places(design, SPECULATORS, 0, 0))
    arrays = tensors.parts(table, weights)
    if design.first is mtp.hidden_first:  # the library knows one order of the halves
        hidden, embed = np.split(arrays["mtp_layers.0.input_proj.weight"], 2, -1)
        arrays["mtp_layers.0.input_proj.weight"] = np.concatenate([embed, hidden], -1)
    arrays = {key: np.asarray(jnp.asarray(a, dtype)) for key, a in arrays.items()}
    config = _config(design) | {"dtype": jnp.dtype(dtype).name}
    folder = tensors.write(Path(folder), config, arrays)
    ids = weights.to_target
    tensors.write_token_map(folder, None if ids is None else np.asarray(ids))
    return folder


# --- configs ----------------------------------------------------------------------------


def _text(hf: dict) -> dict:
    """The text model's part of a config."""
    return hf.get("text_config") or hf


def _own_layout(folder: Path, hf: dict) -> tuple[Layout, int]:
    """How a target's checkpoint names its modules, and how many there are."""
    family = hf.get("model_type")
    layouts = {"deepseek_v3": BEHIND, "glm4_moe": BEHIND, "mimo": MIMO}
    layouts |= dict.fromkeys(GATED, QWEN)
    if family not in layouts:
        raise ValueError(
            f"{folder} is a model of type {family}, whose prediction modules are not "
            f"known; known are {', '.join(layouts)} and folders of the speculators library"
        )
    count = mtp_layers(hf)
    if count < 1:
        raise ValueError(
            f"the config of {folder} says that there are no prediction modules "
            "(num_nextn_predict_layers or mtp_num_hidden_layers)"
        )
    if family in GATED and count > 1:
        raise ValueError(f"{folder} has {count} modules; {family} is known with one")
    return layouts[family], count


def _layer_config(hf: dict) -> Config:
    """A module's one layer: full attention, and experts if the target has any."""
    one = {
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "sliding_window": None,
        "use_sliding_window": False,
        "first_k_dense_replace": 0,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "num_nextn_predict_layers": 0,
        "mtp_num_hidden_layers": 0,
    }
    return config_from_hf(hf | one)


def _check_target(folder: Path, design: Design, target: Model) -> None:
    """Refuses modules that were made for another target, naming both sides."""
    ours, theirs = design.config, target.config
    for field, what in (("vocab_size", "tokens"), ("hidden", "numbers a feature")):
        made, given = getattr(ours, field), getattr(theirs, field)
        if made != given:
            raise ValueError(
                f"{folder} was made for a target with {made} {what}, but {target.name} "
                f"has {given}"
            )


def _config(design: Design) -> dict:
    config = dataclasses.replace(design.config, tie_embeddings=False)
    if config.family == "mimo":
        config = dataclasses.replace(config, family="qwen2")
    layer = config_to_hf(config)
    library = tensors.speculators_config("mtp", layer["architectures"], tokens=3)
    return library | {
        "architectures": ["MTPDraftModel"],
        "num_nextn_predict_layers": 1,
        "transformer_layer_config": layer,
        "tie_word_embeddings": False,
    }


# --- tensors ----------------------------------------------------------------------------


def _prefixes(layout: Layout, depth: int, count: int) -> tuple[str, ...]:
    """What the keys of the modules begin with; nothing if the folder holds only them."""
    if layout is SPECULATORS:
        return ("",)
    return tuple(layout.top(depth, module) for module in range(count))


def _places(
    design: Design, layout: Layout, depth: int, module: int
) -> dict[str, Place]:
    """Key -> place in a module's ``Weights``."""
    config, prefix = design.config, layout.top(depth, module)
    width = config.hidden
    shapes = ((width,), (width,), (width, 2 * width), (width,))
    table = {
        f"{prefix}{name}.weight": names.whole((field,), shape)
        for name, field, shape in zip(layout.names, _FIELDS, shapes, strict=True)
    }
    for name, place in names.of_layer(config, 0).items():
        table[f"{layout.layer(depth, module)}{name}"] = place
    return table


def _fused_experts(table: dict[str, Place]) -> dict[str, Place]:
    """The same table with the experts of a layer in two tensors."""
    out = {}
    for key, place in table.items():
        start, expert, name = key.partition(".mlp.experts.")
        if not expert:
            out[key] = place
            continue
        count, *inner = place.array
        down = name.endswith("down_proj.weight")
        fused = "down_proj" if down else "gate_up_proj"
        shape = place.array if down else (count, inner[0] * inner[1], inner[2])
        out[f"{start}{expert}{fused}"] = Place(place.path, (), shape, place.array)
    return out


def _weights(
    design: Design,
    table: dict[str, Place],
    kept: dict,
    target: Model,
    ids: np.ndarray | None,
) -> Weights:
    arrays = names.nested(tensors.fused(table, kept, target.dtype))
    layer = names.layer_of(design.config, arrays.pop("layers")[0])
    return Weights(
        embed=target.params.embed,
        layers=(layer,),
        head=target_head(target, ids),
        to_target=None if ids is None else jnp.asarray(ids),
        **arrays,
    )
