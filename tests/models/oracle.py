"""Random tiny transformers models, and both sides' logits."""

import functools
import inspect
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from jspec import types

BASE = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "smollm2": {
        "model_type": "llama",
        "hidden_size": 48,
        "num_attention_heads": 6,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    },
    "mistral": {"sliding_window": 8},
    "qwen2": {
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": {"head_dim": 12, "attention_bias": True},
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 12,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 20,
        "final_logit_softcapping": 5.0,
    },
    "qwen3_moe": {
        "head_dim": 12,
        "attention_bias": True,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "deepseek_v3": DEEPSEEK | {"q_lora_rank": 20, "n_group": 4, "topk_group": 2},
    "deepseek_v2": DEEPSEEK
    | {
        "q_lora_rank": None,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
    },
}

# Families whose layers here all have full attention.
FULL = {"head_dim": 16, "layer_types": ["full_attention"] * 3}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
FAMILIES |= {
    "glm4_moe": {
        "head_dim": 16,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
    },
    "qwen3_next": FULL
    | EXPERTS
    | {"shared_expert_intermediate_size": 48, "mlp_only_layers": [1]},
    "qwen3_5_text": FULL,
    "qwen3_5_moe_text": FULL | EXPERTS | {"shared_expert_intermediate_size": 24},
}


def build(name: str, **changes):
    """A random transformers model of a family of ``FAMILIES``, in float32."""
    settings = BASE | {"model_type": name} | FAMILIES[name] | changes
    config = transformers.AutoConfig.for_model(**settings)
    torch.manual_seed(len(name))
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    # The default init is too tame: every logit near 0, every norm neutral.
    with torch.no_grad():
        for key, p in model.named_parameters():
            noise = torch.randn(p.shape)
            if "norm" in key:
                p += 0.2 * noise
            elif key.endswith("bias"):
                p.copy_(0.2 * noise)
            else:
                p.copy_(noise * 1.3 / p.shape[-1] ** 0.5)
        for key, b in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                b.copy_(0.3 * torch.randn(b.shape))
    return model


def save(model, folder: Path, **kwargs) -> Path:
    """``save_pretrained`` without the warnings that concern only transformers."""
    model.save_pretrained(folder, **kwargs)
    return folder


def tokens(count: int, vocab: int = 101, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, vocab, (1, count))


def hf_logits(model, ids: np.ndarray, keep: int = 0) -> np.ndarray:
    """``[T, V]`` of one whole forward, or its last ``keep`` rows."""
    with torch.no_grad():
        out = model(torch.tensor(ids), use_cache=False, logits_to_keep=keep)
    return out.logits[0].numpy()


def hf_steps(model, ids: np.ndarray) -> np.ndarray:
    """``[T, V]`` token by token with transformers' own cache."""
    rows, past = [], transformers.DynamicCache(config=model.config)
    # transformers renames the argument in 5.2x.
    known = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in known else "past_key_values"
    with torch.no_grad():
        for i in range(ids.shape[1]):
            out = model(torch.tensor(ids[:, i : i + 1]), use_cache=True, **{name: past})
            rows.append(out.logits[0, -1].float().numpy())
    return np.stack(rows)


def logits(
    model, ids: np.ndarray, chunks=None, keep: int = 0, level: int = 0
) -> np.ndarray:
    """jspec's ``[T, V]``, scored in chunks of the given sizes (None: all at once).

    ``level`` is the compiler's: for a tiny model compiling takes the time, not running.
    """
    count = ids.shape[1]
    cache = model.target.init_cache(1, count + 8, jnp.float32)
    step, rows, at = _step(model.target, level), [], 0
    for size in chunks or [count]:
        part = jnp.asarray(ids[:, at : at + size], jnp.int32)
        out, cache = step(model.params, cache, part)
        at += size
        if at > count - keep or not keep:
            rows.append(np.asarray(out[0]))
    assert at == count
    return np.concatenate(rows)[-keep:]


@functools.cache
def _step(target, level):
    def step(params, cache, part):
        out = target.score(params, cache, types.chain(part))
        size = part.shape[1]
        path = jnp.arange(size)[None]
        return out.logits, cache.append(out.kv, path, jnp.array([size]))

    return jax.jit(step, compiler_options={"xla_backend_optimization_level": level})


def edit_config(folder: Path, change) -> None:
    """Applies ``change(dict)`` to ``config.json``."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))
