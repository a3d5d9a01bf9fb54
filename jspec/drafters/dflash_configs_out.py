"""``Design`` -> ``config.json`` of the layouts of ``dflash_configs``."""

from __future__ import annotations

import dataclasses
from typing import Any

from jspec.drafters import tensors
from jspec.drafters.dflash_configs import DEEPSPEC, REACH, SPECFORGE, SPECULATORS, ZLAB
from jspec.drafters.diffusion import Design
from jspec.models.hf import config_to_hf


def config_of(
    design: Design, layout: str, target_layers: int, draft_vocab: int, facts: dict
) -> dict:
    """A ``config.json`` that says what ``design`` is.

    Args:
      draft_vocab: ids that are drafted.
      facts: sizes of the weights, by the names that configs use.

    Raises:
      ValueError: the layout cannot say it.
    """
    _check_place(design, layout, facts)
    layers = config_to_hf(
        dataclasses.replace(design.config, tie_embeddings=False, final_softcap=None)
    )
    own = _own(design, layout, facts)
    shape: dict[str, Any] = {
        "block_size": design.block,
        "mask_token_id": design.mask_id,
    }
    if layout == SPECULATORS:
        return _speculators(design, layers, draft_vocab, shape | own)
    shape["target_layer_ids"] = [t - 1 for t in design.taps]
    layers["num_target_layers"] = target_layers
    layers |= _causality(design)
    name = "DSpark" if facts.get("markov_rank") else "DFlash"
    name = "Domino" if "gru_hidden_dim" in facts else name
    if layout == DEEPSPEC:
        return layers | own | shape | {"architectures": [f"Qwen3{name}Model"]}
    name += "2" if "selector_rank" in facts else ""
    block_size = shape.pop("block_size")
    module = name.lower().removesuffix("2")
    return layers | {
        "architectures": [f"{name}DraftModel"],
        "auto_map": {"AutoModel": f"{module}.{name}DraftModel"},
        "block_size": block_size,
        "dflash_config": shape | own,
    }


def _check_place(design: Design, layout: str, facts: dict) -> None:
    """Refuses what a layout has no words for."""

    def refuse(what: str):
        raise ValueError(f"the {layout} layout has no place for {what}")

    config = design.config
    if config.family != "qwen3" and layout != SPECULATORS:
        refuse(f"{config.family} layers; all its readers have those of qwen3")
    if any(config.windows) and design.reach is not REACH[layout]:
        refuse(f"windows as {design.reach.__name__} cuts them")
    spark, selector = facts.get("markov_rank"), "selector_rank" in facts
    if layout == ZLAB and (spark or "enable_confidence_head" in facts):
        refuse("a Markov or confidence head")
    if "gru_hidden_dim" in facts:
        if layout != SPECFORGE:
            refuse("a GRU over the block's tokens")
    elif layout in (ZLAB, SPECFORGE) and design.next_token != bool(spark):
        refuse(
            "rows that guess the next token"
            if design.next_token
            else "a Markov head on rows that guess their own position"
        )
    if layout in (SPECFORGE, DEEPSPEC) and selector:
        refuse("a candidate selector")
    if layout == DEEPSPEC and not design.next_token:
        refuse("rows that guess their own position")
    scaled = (design.embed_scale, design.output_scale, config.final_softcap)
    if layout != ZLAB and scaled != (1.0, 1.0, None):
        refuse("factors on embeddings or logits")


def _own(design: Design, layout: str, facts: dict) -> dict:
    """What is the drafter's own, besides its shape."""
    if layout == SPECFORGE:
        if "gru_hidden_dim" in facts:
            return facts | {
                "projector_type": "domino",
                "shift_label": design.next_token,
            }
        extra = {"projector_type": "dspark"} if facts.get("markov_rank") else {}
        return {"attention_mode": "gqa"} | extra | facts
    if layout == DEEPSPEC:
        rank = {"markov_rank": 0, "enable_confidence_head": False, "num_anchors": 512}
        return rank | facts
    scale = {
        "input_embedding_scale": design.embed_scale,
        "output_multiplier": design.output_scale,
    }
    changed = {k: v for k, v in scale.items() if v != 1.0}
    if design.config.final_softcap is not None:
        changed["final_logit_softcapping"] = design.config.final_softcap
    return facts | changed


def _causality(design: Design) -> dict:
    """``is_causal``, where the layers' windows do not say it already."""
    if design.causal == tuple(w is not None for w in design.config.windows):
        return {}
    if len(set(design.causal)) > 1:
        raise ValueError(
            f"layers that are causal as {list(design.causal)}: the layout says it of all "
            "layers at once, or of those with a window"
        )
    return {"is_causal": design.causal[0]}


def _speculators(design: Design, layers: dict, draft_vocab: int, own: dict) -> dict:
    kind = "dspark" if own.get("markov_rank") else "dflash"
    kind = "dflash2" if "selector_rank" in own else kind
    slides = [w is not None for w in design.config.windows]
    if any(design.causal) and list(design.causal) != slides:
        raise ValueError("the speculators layout lets only sliding layers be causal")
    name = {"dspark": "DSpark", "dflash": "DFlash", "dflash2": "DFlash2"}[kind]
    library = tensors.speculators_config(kind, layers["architectures"], design.most)
    return (
        library
        | own
        | {
            "architectures": [f"{name}DraftModel"],
            "transformer_layer_config": layers,
            "draft_vocab_size": draft_vocab,
            "aux_hidden_state_layer_ids": list(design.taps),
            "target_hidden_size": None,
            "sliding_window_non_causal": any(slides) and not any(design.causal),
            "sample_from_anchor": design.next_token,
            "tie_word_embeddings": False,
        }
    )
