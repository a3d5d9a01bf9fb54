"""Tiny GGUF files, written as llama.cpp's converter writes them."""

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA = NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(key: str, arch: str) -> str:
    stem, kind = key.rsplit(".", 1)
    names = GEMMA if arch == "gemma3" else NAMES
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{names[rest]}.{kind}"
    return f"{names[stem]}.{kind}"


def permute(w: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's ``LlamaModel.permute``."""
    shape = (heads, 2, w.shape[0] // heads // 2, *w.shape[1:])
    return w.reshape(shape).swapaxes(1, 2).reshape(w.shape)


def write(path, hf, arch, *, kind=Type.F32, extra=None, drop=(), raw=None, change=None):
    """Writes a transformers model.

    ``kind`` is the type of every matrix whose rows fit its blocks; ``raw`` maps GGUF
    names to ``(bytes, type)``; ``extra(writer)`` adds metadata; ``change`` edits the
    dict of GGUF tensors.
    """
    config, raw = hf.config, raw or {}
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    if arch in ("qwen3", "gemma3"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if arch == "llama":
        writer.add_rope_dimension_count(config.head_dim)
    if arch == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_freq_base(
            config.rope_parameters["full_attention"]["rope_theta"]
        )
    else:
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if extra:
        extra(writer)
    tensors = {}
    for key, value in hf.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        w = value.numpy()
        if arch == "llama" and "q_proj" in key:
            w = permute(w, config.num_attention_heads)
        if arch == "llama" and "k_proj" in key:
            w = permute(w, config.num_key_value_heads)
        if arch == "gemma3" and key.endswith("norm.weight"):
            w = w + 1
        tensors[gguf_name(key, arch)] = w
    if change:
        change(tensors)
    for name, w in tensors.items():
        if name in drop:
            continue
        if name in raw:
            data, type_ = raw[name]
            writer.add_tensor(name, data, raw_dtype=type_)
            continue
        block, _ = gguf.GGML_QUANT_SIZES[kind]
        fits = w.ndim == 2 and w.shape[1] % block == 0 and kind != Type.F32
        type_ = kind if fits else Type.F32
        writer.add_tensor(name, gguf.quants.quantize(w, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
