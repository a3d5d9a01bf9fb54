"""Families with partly rotated heads, gated attention or prediction modules of their own.

GLM-4.5, MiMo, Qwen3-Next and Qwen3.5: what of their transformers configs other families
do not have. Of the last two only models whose layers all have full attention can be run
as targets; their multi-token-prediction modules are of that kind.
"""

from __future__ import annotations

from typing import Any

# Queries come with a gate, norms are zero-centred.
GATED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
# The share of a head that is rotated when a config does not say.
ROTATED = {"glm4_moe": 0.5, **dict.fromkeys(GATED, 0.25)}
# Families that may have experts; those of Qwen stand beside a gated shared one.
EXPERTS = ("glm4_moe", "qwen3_next", "qwen3_5_moe_text")

_QWEN = {"max_position_embeddings": 32768, "head_dim": 256}

# What transformers takes when a config omits the key; sizes are not defaulted.
DEFAULTS: dict[str, dict[str, Any]] = {
    "mimo": {"max_position_embeddings": 32768, "attention_bias": True},
    "glm4_moe": {
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 1,
    },
    "qwen3_next": {**_QWEN, "norm_topk_prob": True},
    "qwen3_5_text": _QWEN,
    # Has no dense layers, so no size of one.
    "qwen3_5_moe_text": {**_QWEN, "norm_topk_prob": True, "intermediate_size": 0},
}

# What transformers' class of the name always does, whatever a config says.
FIXED: dict[str, dict[str, tuple]] = {
    "glm4_moe": {
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
    },
    "qwen3_next": {},
    "qwen3_5_moe_text": {"norm_topk_prob": (True,)},
}


def mtp_layers(hf: dict) -> int:
    """Modules for multi-token prediction that the checkpoint of a config holds."""
    keys: tuple[str, ...] = ()
    if hf["model_type"] in ("deepseek_v3", "glm4_moe", "mimo"):
        keys = ("num_nextn_predict_layers",)
    if hf["model_type"] in GATED:
        keys = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
    return next((int(hf[key]) for key in keys if hf.get(key)), 0)


def layer_kinds(hf: dict, layers: int) -> list[str]:
    """Per layer of a ``GATED`` family its kind, when ``layer_types`` does not say."""
    interval = hf.get("full_attention_interval", 4)
    return [
        "linear_attention" if (i + 1) % interval else "full_attention"
        for i in range(layers)
    ]
