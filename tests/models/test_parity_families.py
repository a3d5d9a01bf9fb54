"""Partly rotated heads, gated attention and gated shared experts against transformers."""

import numpy as np
import oracle
import pytest

from jspec import models
from jspec.models.hf import config_from_hf, config_to_hf

T = 24
TOLERANCE = 1e-4
VARIANTS = {
    "glm4_moe": {},
    "glm4_moe-plain": {"use_qk_norm": False, "attention_bias": False},
    "qwen3_next": {},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {"partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_transformers(name, tmp_path):
    hf = oracle.build(name.split("-")[0], **VARIANTS[name])
    model = models.load(oracle.save(hf, tmp_path), dtype="float32")
    ids = oracle.tokens(T)
    expected = oracle.hf_logits(hf, ids)
    assert np.abs(expected).max() > 1
    got = oracle.logits(model, ids, [16, 4, 1, 1, 1, 1])
    assert np.abs(got - expected).max() < TOLERANCE
    assert config_from_hf(config_to_hf(model.config)) == model.config


def test_mimo_is_qwen2_under_another_name(tmp_path):
    hf = oracle.build("qwen2", use_sliding_window=False, tie_word_embeddings=False)
    folder = oracle.save(hf, tmp_path)

    def rename(config):
        del config["layer_types"], config["sliding_window"]
        config |= {"model_type": "mimo", "num_nextn_predict_layers": 1}
        config["auto_map"] = {"AutoConfig": "configuration_mimo.MiMoConfig"}

    oracle.edit_config(folder, rename)
    model = models.load(folder, dtype="float32")
    assert model.config.mtp_layers == 1
    ids = oracle.tokens(T)
    gap = oracle.logits(model, ids) - oracle.hf_logits(hf, ids)
    assert np.abs(gap).max() < TOLERANCE


def test_linear_attention_is_refused():
    config = {"model_type": "qwen3_next", "num_hidden_layers": 4}
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_experts": 4}
    with pytest.raises(ValueError, match="linear_attention.*supported: full_attention"):
        config_from_hf(config | sizes)
