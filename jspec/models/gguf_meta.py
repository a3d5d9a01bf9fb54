"""GGUF metadata -> a transformers config dict and a tokenizer."""

from __future__ import annotations

from typing import Any

import numpy as np

from jspec.models.config import Rope
from jspec.models.rope import frequencies

_FAMILY = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3_text",
}
_SIZES = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_GEMMA_PATTERN = 6  # five sliding layers to one full
_GEMMA_27B_LAYERS = 62


def config(metadata: dict[str, Any], shapes: dict[str, tuple], rope_freqs) -> dict:
    """An HF-style config dict.

    Args:
      metadata: the file's key/value pairs.
      shapes: HF tensor name -> shape, for what metadata leaves out.
      rope_freqs: the values of ``rope_freqs.weight`` (Llama 3.1 and later), or None.

    Raises:
      ValueError: a key that is missing or not supported.
    """
    arch = metadata["general.architecture"]

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{arch}.{key}", default)

    def need(key: str) -> Any:
        if get(key) is None:
            raise ValueError(f"GGUF metadata lacks the key {arch}.{key}")
        return get(key)

    if get("expert_count"):
        raise ValueError(
            f"GGUF key {arch}.expert_count = {get('expert_count')} is not supported "
            "(dense MLPs only)"
        )
    hf = {ours: need(theirs) for ours, theirs in _SIZES.items()}
    head_dim = (
        get("attention.key_length")
        or get("rope.dimension_count")
        or hf["hidden_size"] // hf["num_attention_heads"]
    )
    rotated = get("rope.dimension_count", head_dim)
    if rotated != head_dim or get("attention.value_length", head_dim) != head_dim:
        raise ValueError(
            f"GGUF heads of {head_dim} with {rotated} rotated dimensions and values of "
            f"{get('attention.value_length', head_dim)} are not supported (all equal)"
        )
    window = get("attention.sliding_window") or None
    family = "mistral" if arch == "llama" and window else _FAMILY[arch]
    hf |= {
        "model_type": family,
        "vocab_size": shapes["model.embed_tokens.weight"][0],
        "num_key_value_heads": get("attention.head_count_kv")
        or hf["num_attention_heads"],
        "head_dim": head_dim,
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "eos_token_id": eos_ids(metadata) or None,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "sliding_window": window,
        "rope_theta": get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(get, rope_freqs),
    }
    if family in ("llama", "qwen3"):
        hf["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in shapes
        hf["mlp_bias"] = "model.layers.0.mlp.up_proj.bias" in shapes
    if arch == "gemma3":
        hf |= _gemma(get, hf)
    return hf


def eos_ids(metadata: dict[str, Any]) -> list[int]:
    """End of text, of turn and of message, whichever the file names."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    return list(dict.fromkeys(i for i in found if i is not None))


def _gemma(get, hf: dict) -> dict:
    slides = get("attention.sliding_window_pattern", _GEMMA_PATTERN)
    if isinstance(slides, int):
        slides = [(i + 1) % slides != 0 for i in range(hf["num_hidden_layers"])]
    # llama.cpp, too, knows the 27B's different scale by its size only.
    big = hf["num_hidden_layers"] == _GEMMA_27B_LAYERS
    return {
        "layer_types": ["sliding_attention" if s else "full_attention" for s in slides],
        "rope_local_base_freq": get("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": (
            hf["hidden_size"] // hf["num_attention_heads"] if big else hf["head_dim"]
        ),
        "final_logit_softcapping": get("final_logit_softcapping"),
        "attn_logit_softcapping": get("attn_logit_softcapping"),
    }


def _rope_scaling(get, rope_freqs) -> dict | None:
    if rope_freqs is not None:
        return _llama3(np.asarray(rope_freqs, np.float64), get)
    kind = get("rope.scaling.type", "none")
    if kind == "none":
        return None
    out = {"rope_type": kind, "factor": get("rope.scaling.factor")}
    if kind == "yarn":
        out |= {
            "original_max_position_embeddings": get(
                "rope.scaling.original_context_length"
            ),
            "attention_factor": get("rope.scaling.attn_factor"),
            "beta_fast": get("rope.scaling.yarn_beta_fast"),
            "beta_slow": get("rope.scaling.yarn_beta_slow"),
        }
    return out  # an unknown kind is refused by config_from_hf


def _llama3(divisors: np.ndarray, get) -> dict:
    """The settings that give these frequency divisors.

    llama.cpp keeps Llama 3's scaled rotary frequencies as a tensor of divisors; every
    published checkpoint has low 1, high 4 and 8192 original positions.
    """
    theta, dim = float(get("rope.freq_base", 10000.0)), 2 * divisors.size
    rope = Rope(theta, "llama3", float(divisors.max()), 8192, 1.0, 4.0)
    expected = frequencies(Rope(theta), dim) / frequencies(rope, dim)
    if not np.allclose(expected, divisors, rtol=1e-4):
        raise ValueError(
            "GGUF tensor rope_freqs.weight is not Llama 3's scaling with low_freq_factor "
            "1, high_freq_factor 4 and 8192 original positions"
        )
    return {
        "rope_type": "llama3",
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq,
        "high_freq_factor": rope.high_freq,
        "original_max_position_embeddings": rope.original,
    }


def tokenizer(metadata: dict[str, Any]):
    """The file's tokenizer as a transformers one, or None when it has none.

    ``AutoTokenizer.from_pretrained(gguf_file=...)`` makes the same, but needs torch.
    """
    if "tokenizer.ggml.tokens" not in metadata:
        return None
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        GGUF_TOKENIZER_MAPPING,
        convert_gguf_tokenizer,
    )

    settings = {
        ours: metadata[f"tokenizer.{theirs}"]
        for theirs, ours in GGUF_TOKENIZER_MAPPING["tokenizer"].items()
        if f"tokenizer.{theirs}" in metadata
    }
    backend, _ = convert_gguf_tokenizer(metadata["general.architecture"], settings)
    tokens, special = settings["tokens"], {}
    for role in ("bos", "eos", "unknown", "padding"):
        token = metadata.get(f"tokenizer.ggml.{role}_token_id")
        if token is not None:
            name = {"unknown": "unk", "padding": "pad"}.get(role, role)
            special[f"{name}_token"] = tokens[token]
    # llama.cpp adds BOS to a sentencepiece vocabulary that does not say otherwise.
    by_default = settings.get("tokenizer_type") == "llama"
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        add_bos_token=metadata.get("tokenizer.ggml.add_bos_token", by_default),
        add_eos_token=metadata.get("tokenizer.ggml.add_eos_token", False),
        chat_template=metadata.get("tokenizer.chat_template"),
        **special,
    )
