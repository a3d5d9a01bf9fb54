"""Qwen3-MoE and DeepSeek against transformers: variants, trees, published configs."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import safetensors.numpy
import torch

from jspec import models, types
from jspec.models import names
from jspec.models.hf import config_from_hf, config_to_hf

T = 40
TOLERANCE = 1e-4
CHUNKS = [16, 16, 1, 1, 1, 1, 1, 1, 1, 1]
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 500.0,
}
PLAIN = {"rope_type": "default", "rope_theta": 500.0}

# name -> (family, changes, changes of the model it must differ from or None where the
# weights have other shapes)
VARIANTS = {
    "qwen3-every-second": ("qwen3_moe", {"decoder_sparse_step": 2}, None),
    "qwen3-not-normalised": ("qwen3_moe", {"norm_topk_prob": False}, {}),
    "qwen3-window": (
        "qwen3_moe",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 99},
        {},
    ),
    "qwen3-one-expert-tied": (
        "qwen3_moe",
        {"num_experts_per_tok": 1, "tie_word_embeddings": True},
        None,
    ),
    "v3-no-query-latent": ("deepseek_v3", {"q_lora_rank": None}, None),
    "v3-one-group": ("deepseek_v3", {"n_group": 1, "topk_group": 1}, {}),
    "v3-all-groups": ("deepseek_v3", {"topk_group": 4}, {}),
    "v3-not-normalised": ("deepseek_v3", {"norm_topk_prob": False}, {}),
    "v3-scale": ("deepseek_v3", {"routed_scaling_factor": 1.5}, {}),
    "v3-all-dense": ("deepseek_v3", {"first_k_dense_replace": 2}, None),
    "v3-none-dense": ("deepseek_v3", {"first_k_dense_replace": 0}, None),
    "v3-halves-rotate": ("deepseek_v3", {"rope_interleave": False}, {}),
    "v3-bias": ("deepseek_v3", {"attention_bias": True}, None),
    "v3-bias-no-query-latent": (
        "deepseek_v3",
        {"attention_bias": True, "q_lora_rank": None, "tie_word_embeddings": True},
        None,
    ),
    "v3-yarn": ("deepseek_v3", {"rope_parameters": YARN}, {"rope_parameters": PLAIN}),
    "v3-yarn-mscale": (
        "deepseek_v3",
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        {"rope_parameters": YARN},
    ),
    "v3-yarn-two-mscales": (
        "deepseek_v3",
        {"rope_parameters": YARN | {"mscale": 1.3, "mscale_all_dim": 0.7}},
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "v2-greedy": ("deepseek_v2", {"topk_method": "greedy"}, {}),
    "v2-query-latent": ("deepseek_v2", {"q_lora_rank": 20}, None),
    "v2-yarn-mscale": (
        "deepseek_v2",
        {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}},
        {"rope_parameters": YARN},
    ),
}


def gap(a, b):
    return float(np.abs(a - b).max())


@pytest.mark.parametrize("name", VARIANTS)
def test_variant(name, tmp_path):
    family, changes, other = VARIANTS[name]
    small = {"num_hidden_layers": 2, "max_position_embeddings": 64}
    hf = oracle.build(family, **small, **changes)
    model = models.load(oracle.save(hf, tmp_path))
    ids = oracle.tokens(T)
    expected = oracle.hf_logits(hf, ids)
    assert np.abs(expected).max() > 1
    assert gap(oracle.logits(model, ids, CHUNKS), expected) < TOLERANCE
    if other is not None:  # the same weights mean something else without the setting
        rest = oracle.build(family, **small, **other)
        assert gap(oracle.hf_logits(rest, ids), expected) > 0.01
    back = config_to_hf(model.config)
    assert config_from_hf(back) == model.config


# 0 -> 1 -> 2 -> 3, 1 -> 4 -> 5, 0 -> 6
PARENT = (-1, 0, 1, 2, 1, 4, 0)
PATHS = ((0, 1, 2, 3), (0, 1, 4, 5), (0, 6))


@pytest.mark.parametrize("before", [1, 17])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "deepseek_v2"])
def test_tree_block(family, before, tmp_path):
    hf = oracle.build(family)
    model = models.load(oracle.save(hf, tmp_path))
    prefix, nodes = oracle.tokens(before), oracle.tokens(len(PARENT), seed=5)
    live = jnp.ones((1, len(PARENT)), bool)
    block = types.Block(
        jnp.asarray(nodes, jnp.int32), jnp.asarray([PARENT]), live, live
    )

    def run(params, ids):
        cache = model.target.init_cache(1, 32, jnp.float32)
        out = model.target.score(params, cache, types.chain(ids))
        cache = cache.append(out.kv, jnp.arange(before)[None], jnp.array([before]))
        return model.target.score(params, cache, block).logits[0]

    quick = {"xla_backend_optimization_level": 0}
    got = jax.jit(run, compiler_options=quick)(model.params, jnp.asarray(prefix))
    got = np.asarray(got)
    for path in PATHS:
        text = np.concatenate([prefix, nodes[:, list(path)]], 1)
        expected = oracle.hf_logits(hf, text, keep=len(path))
        assert gap(got[list(path)], expected) < TOLERANCE


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_bfloat16_keeps_routers_and_norms_in_float32(family, tmp_path):
    hf = oracle.build(family)
    model = models.load(oracle.save(hf, tmp_path), dtype="bfloat16")
    exact = models.load(tmp_path)
    for path, shape in names.arrays(model.config).items():
        kept = path[-1] in ("router", "correction") or path[-1].endswith("norm")
        array = names.lookup(model.params, path)
        assert array.dtype == (jnp.float32 if kept else jnp.bfloat16)
        assert array.shape == shape
        if kept:
            np.testing.assert_array_equal(array, names.lookup(exact.params, path))
    ids = oracle.tokens(16)
    with torch.no_grad():
        theirs = hf.to(torch.bfloat16)(torch.tensor(ids)).logits[0].float().numpy()
    ours, fine = oracle.logits(model, ids), oracle.logits(exact, ids)
    # As far from float32 as transformers' own bfloat16 is, give or take a factor.
    assert np.abs(ours - fine).mean() < 2 * np.abs(theirs - fine).mean()
    models.save(model, tmp_path / "out")
    again = models.load(tmp_path / "out", dtype="bfloat16")
    for a, b in zip(
        jax.tree.leaves(again.params), jax.tree.leaves(model.params), strict=True
    ):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


# Multi-token prediction behind the last layer.


def add_tensors(folder, extra):
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    for name in extra:
        tensors[name] = np.ones((4, 4), np.float32)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")


MTP = [
    "enorm.weight",
    "eh_proj.weight",
    "embed_tokens.weight",
    "shared_head.head.weight",
    "self_attn.kv_b_proj.weight",
    "mlp.gate.e_score_correction_bias",
    "mlp.experts.7.up_proj.weight",
]


def test_prediction_layers_are_skipped_exactly(tmp_path):
    oracle.save(oracle.build("deepseek_v3"), tmp_path)
    plain = models.load(tmp_path)
    assert plain.config.mtp_layers == 1
    add_tensors(tmp_path, [f"model.layers.3.{name}" for name in MTP])
    model = models.load(tmp_path)
    assert model.config == plain.config
    for a, b in zip(
        jax.tree.leaves(model.params), jax.tree.leaves(plain.params), strict=True
    ):
        np.testing.assert_array_equal(a, b)

    oracle.edit_config(tmp_path, lambda c: c.update(num_nextn_predict_layers=0))
    with pytest.raises(ValueError, match=r"no place for: model\.layers\.3\."):
        models.load(tmp_path)
    oracle.edit_config(tmp_path, lambda c: c.update(num_nextn_predict_layers=2))
    add_tensors(tmp_path, ["model.layers.4.enorm.weight"])
    assert models.load(tmp_path).config.mtp_layers == 2
    for beyond in ("model.layers.5.enorm.weight", "model.layers.30.enorm.weight"):
        add_tensors(tmp_path, [beyond])
        with pytest.raises(ValueError, match=beyond.replace(".", r"\.")):
            models.load(tmp_path)


def test_missing_expert_is_named(tmp_path):
    oracle.save(oracle.build("deepseek_v3"), tmp_path)
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.5.down_proj.weight"]
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.5\.down_proj"):
        models.load(tmp_path)


# Published configs, cut to the keys that matter, and the sizes their authors state.

DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
DEEPSEEK_V2_LITE = DEEPSEEK_V3 | {
    "model_type": "deepseek_v2",
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


@pytest.mark.parametrize(
    "hf, billions",
    [(DEEPSEEK_V3, 671.0), (DEEPSEEK_V2_LITE, 15.7), (QWEN3_30B_A3B, 30.5)],
    ids=["v3", "v2-lite", "qwen3-30b-a3b"],
)
def test_published_config_has_the_published_size(hf, billions):
    config = config_from_hf(hf)
    size = sum(math.prod(shape) for shape in names.arrays(config).values())
    assert size / 1e9 == pytest.approx(billions, abs=0.05)
    assert config_from_hf(config_to_hf(config)) == config


def test_published_deepseek_v3_scales():
    config = config_from_hf(DEEPSEEK_V3)
    mscale = 0.1 * math.log(40) + 1
    assert config.query_scale == pytest.approx(192**-0.5 * mscale**2)
    assert config.ropes[0].attention_factor == 1.0
    assert config.mtp_layers == 1
    assert config.experts.dense_layers == (0, 1, 2)


BAD = [
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method = 'greedy'"),
    ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
    ("deepseek_v3", {"mlp_bias": True}, "mlp_bias = True"),
    ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads = 2"),
    ("deepseek_v3", {"quantization_config": {"fmt": "e4m3"}}, "quantization_config"),
    ("deepseek_v3", {"auto_map": {"AutoModel": "modeling_x.M"}}, "auto_map"),
    ("deepseek_v3", {"kv_lora_rank": None}, "lacks the key kv_lora_rank"),
    ("deepseek_v3", {"n_routed_experts": None}, "lacks the key n_routed_experts"),
    ("deepseek_v3", {"n_shared_experts": 0}, "n_shared_experts = 0"),
    ("deepseek_v3", {"n_group": 3}, "3 equal groups"),
    ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob = True"),
    ("qwen3_moe", {"num_experts": None}, "lacks the key num_experts"),
    ("qwen3_moe", {"num_experts": 0}, "num_experts = 0"),
    ("qwen3_moe", {"kv_lora_rank": 8}, "kv_lora_rank = 8"),
    ("qwen3_moe", {"layer_types": ["sliding_attention"] * 3}, "layer_types"),
    ("qwen3", {"num_experts": 8}, "num_experts = 8"),
    ("llama", {"kv_lora_rank": 8}, "kv_lora_rank = 8"),
]


@pytest.mark.parametrize("family, change, message", BAD, ids=[m for *_, m in BAD])
def test_unsupported_config_is_refused_by_name(family, change, message):
    hf = oracle.BASE | {"model_type": family} | oracle.FAMILIES[family]
    config_from_hf(hf)
    with pytest.raises(ValueError, match=message):
        config_from_hf(hf | change)


def test_v2_always_rotates_neighbours():
    hf = oracle.BASE | {"model_type": "deepseek_v2"} | oracle.FAMILIES["deepseek_v2"]
    assert config_from_hf(hf | {"rope_interleave": False}).latent.interleave


def test_query_latent_must_be_said():
    hf = oracle.BASE | {"model_type": "deepseek_v3"} | oracle.FAMILIES["deepseek_v3"]
    del hf["q_lora_rank"]
    with pytest.raises(ValueError, match="q_lora_rank.*null"):
        config_from_hf(hf)


def test_dense_layers_that_deepseek_cannot_say_are_not_written(tmp_path):
    oracle.save(oracle.build("deepseek_v3"), tmp_path)
    config = config_from_hf(json.loads((tmp_path / "config.json").read_text()))
    late = dataclasses.replace(config.experts, dense_layers=(2,))
    with pytest.raises(ValueError, match="cannot say experts"):
        config_to_hf(dataclasses.replace(config, experts=late))
