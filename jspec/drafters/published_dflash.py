"""Block-diffusion drafters in the folders that others publish and read.

The layouts of ``dflash_configs``: z-lab's (DFlash and DFlash-2), SpecForge's and
DeepSpec's (DFlash and DSpark) and that of the speculators library (all three). None keeps
the target's embedding and head but DeepSpec's, which has copies.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jspec.drafters import (
    dflash_configs,
    dflash_configs_out,
    dflash_tensors,
    tensors,
)
from jspec.drafters.dflash_configs import DEEPSPEC, SPECULATORS
from jspec.drafters.dflash_tensors import COPIES
from jspec.drafters.diffusion import Design, Weights
from jspec.drafters.dspark import Confidence
from jspec.drafters.tensors import target_head
from jspec.models import Model, names

TEMPERATURES = "confidence_temperatures.json"


@dataclasses.dataclass(frozen=True)
class BlockHead:
    """A block-diffusion drafter as a folder holds it.

    Attributes:
      design: static.  weights: its parameters, the target's embedding and head included.
      target_layers: of its target, which configs name.
      layout: one of ``dflash_configs.LAYOUTS``.
    """

    design: Design
    weights: Weights
    target_layers: int
    layout: str


def load_dflash(folder: str | Path, target: Model) -> BlockHead:
    """Reads a drafter and joins it to its target.

    Args:
      folder: holds ``config.json`` and ``model.safetensors``.
      target: gives the embedding, and the head where the folder has none of its own.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: keys missing, left over or of another shape; a drafter for a target of
        another width, vocabulary or depth; a config that asks for what there is not. The
        message names both sides.
    """
    folder = Path(folder)
    hf = tensors.read_config(folder)
    layers = target.config.layers
    design, layout = (
        dflash_configs.design_of(hf, folder, layers),
        dflash_configs.layout_of(hf),
    )
    found = {
        dflash_tensors.renamed(k): x for k, x in tensors.read_tensors(folder).items()
    }
    _check_target(folder, design, hf, found, target)
    ids = None
    if "d2t" in found:
        size = target.config.vocab_size
        ids = tensors.draft_ids(folder, found["d2t"], found.get("t2d"), size)
    elif layout != SPECULATORS:
        ids = tensors.read_token_map(folder, target.config.vocab_size)
    shapes, optional = dflash_tensors.shapes(design, layout, found, target)
    kept = tensors.take(folder, found, shapes, optional)
    if layout == DEEPSPEC:
        _check_copies(folder, kept, target)
    weights = _weights(folder, design, layout, hf, kept, ids, target)
    return BlockHead(design, weights, layers, layout)


def save_dflash(head: BlockHead, folder: str | Path, dtype=jnp.bfloat16) -> Path:
    """Writes a drafter in its layout, which may be replaced before.

    Raises:
      ValueError: a layout that cannot say what the drafter is.
    """
    design, weights, layout = head.design, head.weights, head.layout
    ids, vocab = weights.to_target, weights.embed.shape[0]
    arrays = tensors.parts(dflash_tensors.table(design), weights)
    arrays |= {"fc.weight": np.asarray(weights.fc)}
    arrays |= dflash_tensors.conv_tensors(weights) | dflash_tensors.joint_tensors(
        design, weights, layout
    )
    if ids is not None and layout == SPECULATORS:
        arrays["lm_head.weight"] = np.asarray(weights.head)
    if layout == DEEPSPEC:
        if ids is not None:
            raise ValueError("the deepspec layout has no place for a draft vocabulary")
        copies = (weights.embed, weights.head)
        arrays |= dict(zip(COPIES, map(np.asarray, copies), strict=True))
    arrays = {key: np.asarray(jnp.asarray(a, dtype)) for key, a in arrays.items()}
    if ids is not None and layout == SPECULATORS:
        arrays |= tensors.id_maps(np.asarray(ids), vocab)
    draft_vocab = vocab if ids is None else len(ids)
    config = dflash_configs_out.config_of(
        design,
        layout,
        head.target_layers,
        draft_vocab,
        dflash_tensors.facts(design, weights),
    )
    config["torch_dtype"] = jnp.dtype(dtype).name
    folder = tensors.write(Path(folder), config, arrays)
    beside = None if layout == SPECULATORS or ids is None else np.asarray(ids)
    tensors.write_token_map(folder, beside)
    _write_temperatures(folder, weights.confidence)
    return folder


def _weights(
    folder: Path, design: Design, layout: str, hf: dict, kept: dict, ids, target: Model
) -> Weights:
    dtype = target.dtype
    top = names.nested(tensors.fused(dflash_tensors.table(design), kept, dtype))
    layers = top.pop("layers")

    def get(key: str):
        return jnp.asarray(kept[key], dtype) if key in kept else None

    head = get("lm_head.weight") if layout == SPECULATORS else None
    given = hf | (hf.get("dflash_config") or {})
    sure = dflash_tensors.confidence(get)
    if sure is not None:
        temperature = _read_temperatures(folder, design.most)
        sure = dataclasses.replace(sure, temperature=temperature)
    return Weights(
        embed=target.params.embed,
        layers=tuple(names.layer_of(design.config, layers[i]) for i in sorted(layers)),
        head=target_head(target, ids) if head is None else head,
        fc=get("fc.weight"),
        to_target=None if ids is None else jnp.asarray(ids),
        joint=dflash_tensors.joint(
            design, layout, get, ids, given, target.params.embed
        ),
        confidence=sure,
        convs=dflash_tensors.convs(design, get),
        **top,
    )


# --- what stands beside, and what must agree --------------------------------------------


def _read_temperatures(folder: Path, most: int):
    file = folder / TEMPERATURES
    if not file.is_file():
        return None
    found = json.loads(file.read_text())["temperatures"]
    if len(found) != most or min(found) <= 0:
        raise ValueError(
            f"{file} holds the temperatures {found}; the drafter needs {most}, all above "
            "0, one for each draft of a block"
        )
    return jnp.asarray(found, jnp.float32)


def _write_temperatures(folder: Path, head: Confidence | None) -> None:
    file = folder / TEMPERATURES
    file.unlink(missing_ok=True)
    if head is not None and head.temperature is not None:
        values = np.asarray(head.temperature, np.float64).tolist()
        file.write_text(json.dumps({"temperatures": values}) + "\n")


def _check_copies(folder: Path, kept: dict, target: Model) -> None:
    """Refuses copies of another target's embedding or head; rounding may differ."""
    ours = (target.params.embed, target_head(target))
    for key, array in zip(COPIES, map(np.asarray, ours), strict=True):
        if key in kept and not np.allclose(kept[key], array, rtol=0.02, atol=0.02):
            raise ValueError(f"{folder}: {key} is not that of {target.name}")


def _check_target(folder: Path, design: Design, hf: dict, found, target: Model) -> None:
    """Refuses a drafter that was made for another target, naming both sides."""
    ours, theirs = design.config, target.config
    if ours.vocab_size != theirs.vocab_size or ours.hidden != theirs.hidden:
        raise ValueError(
            f"{folder} was made for a target of width {ours.hidden} with "
            f"{ours.vocab_size} tokens, but {target.name} has {theirs.hidden} and "
            f"{theirs.vocab_size}"
        )
    layers = hf.get("num_target_layers", theirs.layers)
    deep = [t for t in design.taps if t > theirs.layers]
    if layers != theirs.layers or deep:
        raise ValueError(
            f"{folder} was made for a target of {layers} layers and reads features after "
            f"{list(design.taps)} of them, but {target.name} has {theirs.layers}"
        )
