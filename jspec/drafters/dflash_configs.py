"""``config.json`` of published block-diffusion drafters -> ``Design``.

Four layouts. z-lab's and SpecForge's keep what is the drafter's own in ``dflash_config``,
DeepSpec's beside the layers' sizes, and the speculators library has a scheme for all its
drafters. They count layers, name conventions and cut windows differently; a design says
all of it outright.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jspec.drafters import (
    block_reach,
    block_selector,
    dflash,
    domino,
    dspark,
)
from jspec.drafters.diffusion import Design
from jspec.models.config import Config
from jspec.models.hf import config_from_hf
from jspec.models.hf_experts import need

ZLAB, SPECFORGE, DEEPSPEC = "zlab", "specforge", "deepspec"
SPECULATORS = "speculators"
LAYOUTS = (ZLAB, SPECFORGE, DEEPSPEC, SPECULATORS)

REACH = {
    ZLAB: block_reach.by_row,
    SPECFORGE: block_reach.context_only,
    DEEPSPEC: block_reach.by_row,
    SPECULATORS: block_reach.by_anchor,
}
_SPECULATORS_TYPES = ("dflash", "dflash2", "dspark")


def is_dflash(config: dict) -> bool:
    """Does a ``config.json`` look like that of a block-diffusion drafter?"""
    if "speculators_model_type" in config:
        return config["speculators_model_type"] in _SPECULATORS_TYPES
    names = config.get("architectures") or []
    kinds = ("DFlash", "DSpark", "DominoDraft")
    own = any(kind in name for kind in kinds for name in names)
    return own or "dflash_config" in config


def layout_of(hf: dict) -> str:
    """Which of ``LAYOUTS`` a config has."""
    if "speculators_model_type" in hf:
        return SPECULATORS
    inner = hf.get("dflash_config")
    if inner is None:
        return DEEPSPEC if "markov_rank" in hf or "num_anchors" in hf else ZLAB
    forged = "projector_type" in inner or "attention_mode" in inner
    return SPECFORGE if forged else ZLAB


def default_ids(target_layers: int, count: int) -> list[int]:
    """The layers whose outputs are read when a config does not say; counted from 0."""
    if count == 1:
        return [target_layers // 2]
    span = target_layers - 4
    return [round(1 + i * span / (count - 1)) for i in range(count)]


def design_of(hf: dict, folder: Any, target_layers: int) -> Design:
    """What a drafter is, from its config.

    Args:
      folder: for messages.
      target_layers: of the target that it will draft for.

    Raises:
      ValueError: a key that is missing, or whose value is not supported.
    """
    layout = layout_of(hf)
    inner = {k: v for k, v in (hf.get("dflash_config") or {}).items() if v is not None}
    given = {k: v for k, v in hf.items() if v is not None} | inner
    config = _layers(hf.get("transformer_layer_config") or hf, given)
    for key in ("mask_token_id", "block_size"):
        if key not in given:
            raise ValueError(f"{folder}/config.json lacks {key}; a block needs it")
    mask = int(given["mask_token_id"])
    if not 0 <= mask < config.vocab_size:
        raise ValueError(
            f"{folder}: mask_token_id {mask} is not in the vocabulary of "
            f"{config.vocab_size}; the mask needs a row of the target's embedding"
        )
    choose, link = _choice(given, folder)
    next_token = _is_next_token(hf, given, layout)
    if link is dspark.rnn and not next_token:
        raise ValueError(
            f"{folder}: markov_head_type rnn with sample_from_anchor false; its state "
            "would begin at a row that drafts nothing; only next-token blocks have it"
        )
    return Design(
        config=config,
        taps=_taps(hf, given, layout, config, target_layers, folder),
        block=int(given["block_size"]),
        mask_id=mask,
        next_token=next_token,
        causal=_causal(hf, given, layout, config),
        choose=choose,
        reach=REACH[layout],
        link=link,
        embed_scale=float(given.get("input_embedding_scale", 1.0)),
        output_scale=float(given.get("output_multiplier", 1.0)),
    )


def _layers(hf: dict, given: dict) -> Config:
    """The layers of a drafter; what others make of a window is read from its layers."""
    own = {k: v for k, v in hf.items() if v is not None}
    for key in ("auto_map", "final_logit_softcapping"):
        own.pop(key, None)
    own.setdefault("model_type", "qwen3")
    if "sliding_attention" in (own.get("layer_types") or []):
        need(own, "sliding_window")
        own["use_sliding_window"] = True
    config = config_from_hf(own)
    return dataclasses.replace(
        config, final_softcap=given.get("final_logit_softcapping")
    )


def _choice(given: dict, folder: Any):
    """``Design.choose`` and ``Design.link``."""
    projector = given.get("projector_type") or ""
    if projector == "domino":
        return dspark.left_to_right, domino.gru
    if projector not in ("", "dflash", "dspark"):
        raise ValueError(f"{folder}: projector_type {projector!r} is not supported")
    if "selector_rank" in given:
        return block_selector.selected, None
    if not given.get("markov_rank"):
        return dflash.independent, None
    kind = given.get("markov_head_type", "vanilla")
    if kind not in dspark.LINKS:
        raise ValueError(
            f"{folder}: markov_head_type {kind!r} is not one of {', '.join(dspark.LINKS)}"
        )
    return dspark.left_to_right, dspark.LINKS[kind]


def _is_next_token(hf: dict, given: dict, layout: str) -> bool:
    if "sample_from_anchor" in given:
        return bool(given["sample_from_anchor"])
    if layout == SPECULATORS:
        return hf["speculators_model_type"] == "dspark"
    if given.get("projector_type") == "domino":
        return bool(given.get("shift_label"))
    return layout == DEEPSPEC or given.get("projector_type") == "dspark"


def _taps(hf, given, layout, config: Config, target_layers: int, folder) -> tuple:
    if layout == SPECULATORS:
        ids = given.get("aux_hidden_state_layer_ids")
        if ids is not None:
            return tuple(ids)
    ids = given.get("target_layer_ids")
    if ids is None:
        ids = default_ids(target_layers, config.layers)
    if target_layers - 1 in ids:
        raise ValueError(
            f"{folder} reads the output of layer {target_layers - 1}, the target's last: "
            "some implementations take it before the final norm and some after, so it "
            "cannot be told which this drafter was trained on"
        )
    return tuple(i + 1 for i in ids)  # -1, the embedding, becomes 0


def _causal(hf: dict, given: dict, layout: str, config: Config) -> tuple[bool, ...]:
    slides = tuple(w is not None for w in config.windows)
    if layout == SPECULATORS:
        whole = given.get("sliding_window_non_causal", False)
        return (False,) * config.layers if whole else slides
    said = given.get("is_causal", given.get("causal"))
    return slides if said is None else (bool(said),) * config.layers
