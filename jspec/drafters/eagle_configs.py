"""``config.json`` of an EAGLE head <-> ``Design``, in the layouts that others publish."""

from __future__ import annotations

import dataclasses

from jspec.drafters import eagle, tensors
from jspec.drafters.eagle import Design, Weights
from jspec.models import Model
from jspec.models.config import Config
from jspec.models.hf import config_from_hf, config_to_hf

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


def layers_config(hf: dict) -> Config:
    """The decoder layers of a head from its (or its ``transformer_layer_config``'s) dict."""
    own = {"model_type": "llama", "max_position_embeddings": 2048}
    return config_from_hf(own | {k: v for k, v in hf.items() if v is not None})


def default_taps(layers: int) -> tuple[int, ...]:
    """EAGLE-3's low, middle and high feature: what layers 2, n/2 and n - 3 receive."""
    return 2, layers // 2, layers - 3


def official_design(hf: dict, target: Model) -> Design:
    """EAGLE-3 as the authors and SpecForge write it."""
    ids = (hf.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    # These count what a layer receives; a list that begins with 1 counts outputs.
    if ids and ids[0] == 1:
        ids = [i + 1 for i in ids]
    taps = tuple(ids) if ids else default_taps(target.config.layers)
    return Design(layers_config(hf), taps, eagle.eagle3, eagle.fuse)


def speculators_design(hf: dict, target: Model) -> Design:
    """EAGLE-3 or P-EAGLE as the speculators library writes it.

    Raises:
      ValueError: a P-EAGLE head without a mask token of the target.
    """
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
        layers_config(hf["transformer_layer_config"]),
        tuple(ids) if ids else default_taps(target.config.layers),
        eagle.eagle3,
        eagle.fuse,
        norm_before_residual=bool(hf.get("norm_before_residual")),
        # The library's own P-EAGLE does not heed it either: nothing is fed back.
        norm_output=mask_id is None and bool(hf.get("norm_output")),
        mask_id=mask_id,
    )


def config_of(head: Head, vocab_size: int) -> dict:
    """The ``config.json`` of a head in its layout; ``vocab_size`` is the target's.

    Raises:
      ValueError: the layout cannot say what the head is.
    """
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
