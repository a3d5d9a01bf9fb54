"""Experts and latent attention of a transformers config <-> ``Experts`` and ``Latent``."""

from __future__ import annotations

import math
from typing import Any

from jspec.models import hf_families
from jspec.models.config import Config, Experts, Latent, Rope
from jspec.models.hf_rope import unsupported

DEEPSEEK = ("deepseek_v2", "deepseek_v3")
FAMILIES = ("qwen3_moe", *DEEPSEEK, *hf_families.EXPERTS)

# What transformers takes when a config omits the key; sizes are not defaulted.
DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "norm_topk_prob": False,
    },
    "deepseek_v2": {
        "max_position_embeddings": 2048,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 0,
        "eos_token_id": 2,
        "bos_token_id": 1,
    },
    "deepseek_v3": {
        "max_position_embeddings": 4096,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "n_group": 8,
        "topk_group": 4,
        "num_nextn_predict_layers": 1,
        "eos_token_id": 1,
        "bos_token_id": 0,
    },
    **hf_families.DEFAULTS,
}

# What transformers' class of the name always does, whatever a config says.
_FIXED: dict[str, dict[str, tuple]] = {
    "qwen3_moe": {},
    "deepseek_v2": {
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy"),
        "norm_topk_prob": (False,),
        "moe_layer_freq": (1,),
        "mlp_bias": (False,),
    },
    "deepseek_v3": {
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
        "mlp_bias": (False,),
    },
    **hf_families.FIXED,
}


def experts_from_hf(hf: dict) -> Experts | None:
    """The experts of a config with its defaults filled in; None for other families.

    Raises:
      ValueError: a missing size, or a value that is not supported.
    """
    family = hf["model_type"]
    if family not in FAMILIES:
        return None
    for key, supported in _FIXED[family].items():
        if hf.get(key) is not None and hf[key] not in supported:
            raise unsupported(key, hf[key], list(supported))
    if family == "qwen3_moe" or family in hf_families.GATED:
        return Experts(
            count=_at_least_one(hf, "num_experts", "num_local_experts"),
            per_token=need(hf, "num_experts_per_tok"),
            intermediate=need(hf, "moe_intermediate_size"),
            normalise=bool(hf["norm_topk_prob"]),
            shared=_shared_qwen(hf),
            shared_gate=family in hf_families.GATED,
            dense_layers=_dense_qwen(hf),
        )
    v3 = family in ("deepseek_v3", "glm4_moe")
    grouped = v3 or (hf.get("topk_method") or "greedy") != "greedy"
    layers = range(need(hf, "num_hidden_layers"))
    return Experts(
        count=need(hf, "n_routed_experts", "num_local_experts"),
        per_token=need(hf, "num_experts_per_tok"),
        intermediate=need(hf, "moe_intermediate_size"),
        score="sigmoid" if v3 else "softmax",
        normalise=v3 and bool(hf["norm_topk_prob"]),
        scale=float(hf["routed_scaling_factor"]),
        groups=need(hf, "n_group") if grouped else 1,
        groups_kept=need(hf, "topk_group") if grouped else 1,
        corrected=v3,
        shared=_at_least_one(hf, "n_shared_experts"),
        dense_layers=tuple(layers[: need(hf, "first_k_dense_replace")]),
    )


def latent_from_hf(hf: dict) -> Latent | None:
    """The latent attention of a config; None for families without it.

    Raises:
      ValueError: a missing size, or grouped key/value heads.
    """
    if hf["model_type"] not in DEEPSEEK:
        return None
    heads = need(hf, "num_attention_heads")
    if hf.get("num_key_value_heads") not in (None, heads):
        raise unsupported("num_key_value_heads", hf["num_key_value_heads"], f"{heads}")
    if "q_lora_rank" not in hf:
        raise ValueError("config lacks the key q_lora_rank (null for no query latent)")
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    v2 = hf["model_type"] == "deepseek_v2"
    return Latent(
        rank=need(hf, "kv_lora_rank"),
        query_rank=hf["q_lora_rank"],
        plain_dim=need(hf, "qk_nope_head_dim"),
        rope_dim=need(hf, "qk_rope_head_dim"),
        value_dim=need(hf, "v_head_dim"),
        interleave=v2 or bool(hf.get("rope_interleave", True)),
        mscale_all_dim=float(rope.get("mscale_all_dim") or 0),
    )


def query_scale(latent: Latent, rope: Rope) -> float:
    """``1 / sqrt(D)``, times the square of YaRN's factor if the config asks for it."""
    scale = (latent.plain_dim + latent.rope_dim) ** -0.5
    if rope.kind == "default" or rope.factor <= 1:
        return scale
    return scale * (0.1 * latent.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2


def experts_to_hf(config: Config) -> dict[str, Any]:
    """The keys of a transformers config that say ``config.experts``."""
    experts = config.experts
    if experts is None:
        return {}
    out: dict[str, Any] = {
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.intermediate,
        "norm_topk_prob": experts.normalise,
    }
    if config.family in hf_families.GATED:
        wide = experts.shared * experts.intermediate
        out["shared_expert_intermediate_size"] = wide
    if config.family == "qwen3_moe" or config.family in hf_families.GATED:
        return out | {
            "num_experts": experts.count,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(experts.dense_layers),
        }
    out |= {
        "n_routed_experts": experts.count,
        "n_shared_experts": experts.shared,
        "routed_scaling_factor": experts.scale,
        "n_group": experts.groups,
        "topk_group": experts.groups_kept,
        "first_k_dense_replace": len(experts.dense_layers),
    }
    if config.family == "deepseek_v2":
        return out | {"topk_method": "group_limited_greedy"}
    return out


def latent_to_hf(config: Config, rope_parameters: dict) -> dict[str, Any]:
    """The keys that say ``config.latent``, ``rope_parameters`` completed among them."""
    latent = config.latent
    if latent is None:
        return {}
    if latent.mscale_all_dim:
        rope_parameters = rope_parameters | {"mscale_all_dim": latent.mscale_all_dim}
    out: dict[str, Any] = {
        "kv_lora_rank": latent.rank,
        "q_lora_rank": latent.query_rank,
        "qk_nope_head_dim": latent.plain_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "head_dim": latent.rope_dim,
        "rope_parameters": rope_parameters,
    }
    if config.family == "deepseek_v3":
        out["rope_interleave"] = latent.interleave
    return out


def need(hf: dict, *keys: str) -> int:
    """The size under the first of ``keys`` that the config has.

    Raises:
      ValueError: it has none of them.
    """
    for key in keys:
        if hf.get(key) is not None:
            return int(hf[key])
    raise ValueError(f"config lacks the key {keys[0]}")


def _at_least_one(hf: dict, *keys: str) -> int:
    count = need(hf, *keys)
    if count < 1:
        raise unsupported(keys[0], count, "at least 1")
    return count


def _shared_qwen(hf: dict) -> int:
    """How many experts the shared MLP is as wide as; 0 for families without one."""
    if hf["model_type"] not in hf_families.GATED:
        return 0
    key = "shared_expert_intermediate_size"
    times, rest = divmod(need(hf, key), need(hf, "moe_intermediate_size"))
    if rest or not times:
        raise unsupported(key, hf[key], "a multiple of moe_intermediate_size")
    return times


def _dense_qwen(hf: dict) -> tuple[int, ...]:
    """Layers without experts: those listed, and all but every ``step``-th."""
    listed, step = hf.get("mlp_only_layers") or (), hf.get("decoder_sparse_step", 1)
    layers = range(need(hf, "num_hidden_layers"))
    return tuple(i for i in layers if i in listed or (i + 1) % step)
