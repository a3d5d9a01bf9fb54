"""transformers' ``config.json`` <-> ``Config``.

A supported ``model_type`` means what transformers' class of that name means by it; a
key that asks for something else is an error, never a default.
"""

from __future__ import annotations

import math
from typing import Any

from jspec.models import hf_experts
from jspec.models.config import Config
from jspec.models.hf_experts import DEEPSEEK, need
from jspec.models.hf_families import GATED, ROTATED, mtp_layers
from jspec.models.hf_rope import rope_to_hf, ropes_from_hf, unsupported
from jspec.models.hf_windows import kind, layer_kinds, windows

ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu")

# What transformers takes when a config omits the key. Sizes are not defaulted but for
# Gemma 3, whose published configs rely on them.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "sliding_window": 4096},
    "qwen3": {
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "head_dim": 128,
    },
    "gemma3_text": {
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "eos_token_id": 1,
        "bos_token_id": 2,
    },
    **hf_experts.DEFAULTS,
}

# Keys whose presence (not None, False, 0 or empty) changes what the model computes.
_UNSUPPORTED = {
    "quantization_config": "unquantised weights only",
    "auto_map": "no remote code",
    "use_bidirectional_attention": "causal attention only",
    "pruned_heads": "whole layers only",
    "add_cross_attention": "decoder-only models",
    "is_encoder_decoder": "decoder-only models",
    "per_layer_config": "equal layers only",
}
# The same, but for the families that have them.
_EXPERTS = (
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "moe_intermediate_size",
    "num_experts_per_tok",
)
_LATENT = ("kv_lora_rank",)
_QK_NORM = ("qwen3", "qwen3_moe", "gemma3_text", *GATED)
_NO_OUT_BIAS = ("qwen2", "mistral", "mimo", "glm4_moe")


def config_from_hf(hf: dict) -> Config:
    """A transformers config dict (``config.json``) as a ``Config``.

    Model types: llama, mistral, qwen2, qwen3, qwen3_moe, deepseek_v2, deepseek_v3,
    glm4_moe, mimo, gemma3_text, and gemma3 (its ``text_config``); qwen3_next, qwen3_5_text
    and qwen3_5_moe_text when all layers have full attention. Both rope layouts are read:
    ``rope_parameters`` (transformers 5) and ``rope_theta`` with ``rope_scaling`` (4).

    Raises:
      ValueError: a missing size, or a key whose value is not supported; the message
        names the key, the value and what is supported.
    """
    _refuse(hf)
    if hf.get("model_type") == "gemma3":
        hf = _gemma3_text(hf)
        _refuse(hf)
    family = hf.get("model_type")
    if family not in _DEFAULTS:
        raise unsupported("model_type", family, [*_DEFAULTS, "gemma3"])
    hf = _DEFAULTS[family] | hf
    heads = need(hf, "num_attention_heads")
    hidden = need(hf, "hidden_size")
    layers = need(hf, "num_hidden_layers")
    latent = hf_experts.latent_from_hf(hf)
    head_dim = hf.get("head_dim") or hidden // heads
    if latent is not None:
        head_dim = latent.plain_dim + latent.rope_dim
    bias = bool(hf.get("attention_bias"))
    gemma, glm = family == "gemma3_text", family == "glm4_moe"
    kinds = layer_kinds(hf, family, layers)
    scalar = float(hf["query_pre_attn_scalar"]) if gemma else head_dim
    ropes = ropes_from_hf(hf, kinds)
    scale = hf_experts.query_scale(latent, ropes[0]) if latent else scalar**-0.5
    return Config(
        family=family,
        vocab_size=need(hf, "vocab_size"),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=hf.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        intermediate=need(hf, "intermediate_size"),
        norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
        zero_centred=gemma or family in GATED,
        activation=_activation(hf),
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or (bias and family != "mistral"),
        out_bias=bias and family not in _NO_OUT_BIAS,
        mlp_bias=bool(hf.get("mlp_bias")) and family == "llama",
        qk_norm=family in _QK_NORM or (glm and bool(hf.get("use_qk_norm"))),
        gated=family in GATED,
        sandwich_norm=gemma,
        embed_scale=hidden**0.5 if gemma else 1.0,
        query_scale=scale,
        windows=windows(hf, kinds),
        ropes=ropes,
        attn_softcap=hf.get("attn_logit_softcapping") if gemma else None,
        final_softcap=hf.get("final_logit_softcapping") if gemma else None,
        experts=hf_experts.experts_from_hf(hf),
        latent=latent,
        mtp_layers=mtp_layers(hf),
        max_position=need(hf, "max_position_embeddings"),
        eos_ids=_ids(hf.get("eos_token_id")),
        bos_id=next(iter(_ids(hf.get("bos_token_id"))), None),
    )


def config_to_hf(config: Config) -> dict:
    """A dict that transformers loads as the same model (its 5.x key layout).

    Raises:
      ValueError: the config holds something its family cannot say in transformers.
    """
    gemma = config.family == "gemma3_text"
    ropes = {kind(w): r for w, r in zip(config.windows, config.ropes, strict=True)}
    hf: dict[str, Any] = {
        "architectures": [_CLASSES[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_activation" if gemma else "hidden_act": config.activation,
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_id,
        "eos_token_id": _one_or_list(config.eos_ids),
    }
    if config.family not in ("qwen2", "mistral"):
        hf["attention_bias"] = config.qkv_bias
    if config.family == "llama":
        hf["mlp_bias"] = config.mlp_bias
    if gemma:
        hf["query_pre_attn_scalar"] = _whole(config.query_scale**-2)
        hf["attn_logit_softcapping"] = config.attn_softcap
        hf["final_logit_softcapping"] = config.final_softcap
        hf["rope_parameters"] = {k: rope_to_hf(r) for k, r in ropes.items()}
    else:
        hf["rope_parameters"] = rope_to_hf(config.ropes[0])
    if config.family in ROTATED:
        hf["rope_parameters"] |= {"partial_rotary_factor": config.ropes[0].fraction}
    window = next((w for w in config.windows if w is not None), None)
    if config.family in ("mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text"):
        hf["sliding_window"] = window
    if config.family in ("qwen2", "qwen3", "qwen3_moe"):
        hf["use_sliding_window"] = window is not None
    if config.family in ("qwen2", "qwen3", "gemma3_text", *GATED):
        hf["layer_types"] = [kind(w) for w in config.windows]
    if config.family == "glm4_moe":
        hf["use_qk_norm"] = config.qk_norm
    if config.family in ("deepseek_v3", "glm4_moe", "mimo", *GATED):
        hf["num_nextn_predict_layers"] = config.mtp_layers
    hf |= hf_experts.experts_to_hf(config)
    hf |= hf_experts.latent_to_hf(config, hf["rope_parameters"])
    _check_round_trip(config, hf)
    return hf


_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "mimo": "MiMoForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}


def _refuse(hf: dict) -> None:
    family, refused = hf.get("model_type"), dict(_UNSUPPORTED)
    if family not in hf_experts.FAMILIES:
        refused |= dict.fromkeys(_EXPERTS, "dense MLPs only")
    if family not in DEEPSEEK:
        refused |= dict.fromkeys(_LATENT, "grouped-query attention only")
    if _is_known_code(family, hf.get("auto_map")):
        del refused["auto_map"]
    for key, supported in refused.items():
        if hf.get(key):
            raise unsupported(key, hf[key], supported)


def _is_known_code(family: str | None, auto_map: Any) -> bool:
    """Whether the code that a config names is what the family means here."""
    files = {str(v).split(".")[0] for v in (auto_map or {}).values()}
    name = "deepseek" if family in DEEPSEEK else family
    known = family in (*DEEPSEEK, "mimo")
    return known and files <= {f"configuration_{name}", f"modeling_{name}"}


def _gemma3_text(hf: dict) -> dict:
    """The text part of a multimodal Gemma 3 config; the wrapper's token ids win."""
    text = hf.get("text_config")
    if not text:
        raise ValueError("config of model_type gemma3 lacks the key text_config")
    outer = ("eos_token_id", "bos_token_id", "tie_word_embeddings")
    text = text | {k: hf[k] for k in outer if hf.get(k) is not None}
    return text | {"model_type": text.get("model_type", "gemma3_text")}


def _activation(hf: dict) -> str:
    key = "hidden_activation" if hf["model_type"] == "gemma3_text" else "hidden_act"
    name = hf.get(key, "silu")
    if name not in ACTIVATIONS:
        raise unsupported(key, name, ACTIVATIONS)
    return name


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (int(value),)


def _one_or_list(ids: tuple[int, ...]) -> Any:
    return (ids[0] if len(ids) == 1 else list(ids)) if ids else None


def _whole(x: float) -> float | int:
    near = round(x)
    return near if math.isclose(x, near, rel_tol=1e-9) else x


def _check_round_trip(config: Config, hf: dict) -> None:
    """A config that its family cannot express must not be written as something else."""
    back = config_from_hf(hf)
    for field in config.__dataclass_fields__:
        ours, theirs = getattr(config, field), getattr(back, field)
        same = (
            math.isclose(ours, theirs, rel_tol=1e-6)
            if isinstance(ours, float) and isinstance(theirs, float)
            else ours == theirs
        )
        if not same:
            raise ValueError(
                f"a {config.family} config of transformers cannot say {field} = {ours!r}"
            )
