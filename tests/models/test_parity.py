"""jspec against transformers on random tiny models of every family, in float32."""

import dataclasses
import json

import numpy as np
import oracle
import pytest
import torch
import transformers

from jspec import models
from jspec.models.hf import config_from_hf, config_to_hf

T = 40  # five windows of 8
TOLERANCE = 1e-4
CHUNKS = [16, 8, 8, 8]


def gap(a, b):
    return float(np.abs(a - b).max())


@pytest.mark.parametrize("name", oracle.FAMILIES)
def test_family_whole_in_chunks_and_step_by_step(name, tmp_path):
    hf = oracle.build(name)
    model = models.load(oracle.save(hf, tmp_path))
    ids = oracle.tokens(T)
    expected = oracle.hf_logits(hf, ids)
    assert np.abs(expected).max() > 1
    assert gap(oracle.logits(model, ids), expected) < TOLERANCE
    assert gap(oracle.logits(model, ids, CHUNKS), expected) < TOLERANCE
    assert gap(oracle.logits(model, ids, [1] * T), expected) < TOLERANCE
    assert gap(oracle.hf_steps(hf, ids), expected) < TOLERANCE


@pytest.mark.parametrize("name", ["mistral", "qwen2", "gemma3"])
def test_the_window_matters_in_these_tests(name, tmp_path):
    hf = oracle.build(name)
    wide = oracle.build(name, sliding_window=T)
    ids = oracle.tokens(T)
    a, b = oracle.hf_logits(hf, ids), oracle.hf_logits(wide, ids)
    assert gap(a[:8], b[:8]) < TOLERANCE
    assert gap(a[8:], b[8:]) > 0.1


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 1), (6, 2)])
def test_heads_and_tied_embeddings(heads, kv_heads, tie, tmp_path):
    hf = oracle.build(
        "llama",
        hidden_size=48,
        head_dim=8,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tie,
    )
    model = models.load(oracle.save(hf, tmp_path))
    assert (model.params.head is None) == tie
    ids = oracle.tokens(12)
    assert gap(oracle.logits(model, ids), oracle.hf_logits(hf, ids)) < TOLERANCE


def test_multimodal_gemma3_gives_its_text_model(tmp_path):
    # transformers' wrapper leaves the cap on the logits out.
    text = oracle.BASE | oracle.FAMILIES["gemma3"] | {"final_logit_softcapping": None}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
    }
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=99,
        boi_token_index=97,
        eoi_token_index=98,
        eos_token_id=[2, 7],
    )
    torch.manual_seed(0)
    hf = transformers.Gemma3ForConditionalGeneration(config).eval()
    model = models.load(oracle.save(hf, tmp_path))
    assert model.config.family == "gemma3_text"
    assert model.config.eos_ids == (2, 7)
    ids = oracle.tokens(T, vocab=90)
    assert gap(oracle.logits(model, ids), oracle.hf_logits(hf, ids)) < TOLERANCE


# Rotary variants: name -> (settings, context length); all reach beyond the original.
ROPES = {
    "linear": ({"rope_type": "linear", "factor": 4.0}, 64),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        64,
    ),
    "yarn": (
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        64,
    ),
    "yarn-mscale": (
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "truncate": False,
        },
        64,
    ),
    "yarn-attention": (
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "attention_factor": 0.8,
        },
        64,
    ),
    "dynamic": ({"rope_type": "dynamic", "factor": 2.0}, 16),
}


@pytest.mark.parametrize("variant", ROPES)
def test_rope_variant(variant, tmp_path):
    settings, longest = ROPES[variant]
    settings = settings | {"rope_theta": 500.0}
    hf = oracle.build(
        "llama", max_position_embeddings=longest, rope_parameters=settings
    )
    model = models.load(oracle.save(hf, tmp_path))
    ids = oracle.tokens(T)
    # transformers' dynamic angles depend on the length of the call; token by token is
    # the case where every key gets the angle of its own time, as here always.
    expected = oracle.hf_steps(hf, ids)
    assert gap(oracle.logits(model, ids), expected) < TOLERANCE
    plain = oracle.build("llama", rope_parameters={"rope_theta": 500.0})
    assert gap(oracle.hf_steps(plain, ids)[20:], expected[20:]) > 0.1


@pytest.mark.parametrize("variant", ROPES)
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_old_rope_layout_means_the_same(variant, key, tmp_path):
    settings, longest = ROPES[variant]
    new = oracle.BASE | {
        "model_type": "llama",
        "max_position_embeddings": longest,
        "rope_parameters": settings | {"rope_theta": 500.0},
    }
    scaling = {key if k == "rope_type" else k: v for k, v in settings.items()}
    old = {k: v for k, v in new.items() if k != "rope_parameters"}
    old |= {"rope_theta": 500.0, "rope_scaling": scaling}
    assert config_from_hf(old) == config_from_hf(new)
    assert config_from_hf(old).ropes[0].kind == settings["rope_type"]


def test_gemma3_rope_per_layer_type(tmp_path):
    new = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 9e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    hf = oracle.build("gemma3", rope_parameters=new)
    model = models.load(oracle.save(hf, tmp_path))
    ids = oracle.tokens(T)
    assert gap(oracle.logits(model, ids), oracle.hf_logits(hf, ids)) < TOLERANCE

    def to_old(config):
        del config["rope_parameters"]
        config["rope_theta"], config["rope_local_base_freq"] = 9e5, 2e4
        config["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}

    oracle.edit_config(tmp_path, to_old)
    assert models.load(tmp_path).config == model.config


@pytest.mark.parametrize("name", oracle.FAMILIES)
def test_config_survives_the_way_there_and_back(name, tmp_path):
    hf = oracle.build(name)
    oracle.save(hf, tmp_path)
    config = config_from_hf(json.loads((tmp_path / "config.json").read_text()))
    back = config_to_hf(config)
    assert config_from_hf(back) == config
    theirs = transformers.AutoConfig.for_model(**back)
    assert config_from_hf(theirs.to_dict()) == config
    for key in ("layer_types", "sliding_window", "rope_parameters", "head_dim"):
        if hasattr(hf.config, key):
            assert getattr(theirs, key) == getattr(hf.config, key), key


BAD = [
    ({"model_type": "gpt2"}, "model_type = 'gpt2'"),
    ({"hidden_act": "relu"}, "hidden_act = 'relu'"),
    ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
    ({"rope_scaling": {"type": "su", "factor": 2.0}}, "'su'"),
    ({"rope_scaling": {"type": "linear"}}, "factor"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mrope_section": [2]}}, "mrope"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"num_local_experts": 8}, "num_local_experts = 8"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ({"auto_map": {"AutoModel": "x.py"}}, "auto_map"),
    ({"layer_types": ["sliding_attention"] * 3}, "layer_types"),
    ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 3}, "window"),
    ({"model_type": "qwen2", "layer_types": ["linear_attention"] * 3}, "linear_att"),
    ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "1 entries"),
    ({"model_type": "gemma3"}, "text_config"),
    (
        {"model_type": "gemma3_text", "use_bidirectional_attention": True},
        "bidirectional",
    ),
    ({"model_type": "gemma3_text", "rope_parameters": {"rope_theta": 2.0}}, "rope_par"),
    ({"hidden_size": None}, "hidden_size"),
    ({"num_key_value_heads": 3}, "cannot share"),
]


@pytest.mark.parametrize("change, message", BAD, ids=[m for _, m in BAD])
def test_unsupported_config_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(oracle.BASE | {"model_type": "llama"} | change)


def test_config_that_transformers_cannot_say_is_not_written():
    config = config_from_hf(oracle.BASE | {"model_type": "llama"})
    windowed = dataclasses.replace(config, windows=(4, None, None))
    with pytest.raises(ValueError, match="cannot say windows"):
        config_to_hf(windowed)
