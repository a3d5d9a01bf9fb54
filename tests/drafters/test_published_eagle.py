"""EAGLE heads in published layouts: exact keys, there and back, and clear refusals."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity import DATA
from safetensors.numpy import load_file, save_file

import jspec
from jspec.drafters.published_eagle import (
    SPECULATORS,
    Head,
    is_eagle,
    load_eagle,
    save_eagle,
)
from jspec.drafters.tensors import TOKEN_MAP
from jspec.testing import tiny
from jspec.train.starts import fresh_eagle1, fresh_eagle3

TARGET = tiny.model(vocab_size=96, hidden=32, layers=6)
IDS = np.arange(3, 83, 2, dtype=np.int32)
LAYER = [
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "post_attention_layernorm.weight",
]


def head3(**changes):
    head = fresh_eagle3(TARGET, (2, 3, 4), IDS, jax.random.key(0))
    return dataclasses.replace(head, **changes)


def head1():
    return fresh_eagle1(TARGET, jax.random.key(0))


def test_official_eagle3_keys(tmp_path):
    save_eagle(head3(), tmp_path, jnp.float32)
    stored = load_file(tmp_path / "model.safetensors")
    layer = ["input_layernorm.weight", "hidden_norm.weight", *LAYER]
    expected = {f"midlayer.{name}" for name in layer}
    expected |= {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert stored.keys() == expected
    assert stored["midlayer.self_attn.q_proj.weight"].shape == (32, 64)
    assert stored["midlayer.self_attn.v_proj.weight"].shape == (16, 64)
    assert stored["fc.weight"].shape == (32, 96)
    assert stored["lm_head.weight"].shape == (40, 32)
    assert stored["d2t"].dtype == np.int64 and stored["t2d"].dtype == np.bool_
    assert (stored["d2t"] + np.arange(40) == IDS).all()
    assert np.flatnonzero(stored["t2d"]).tolist() == IDS.tolist()
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["draft_vocab_size"], config["vocab_size"]) == (40, 96)
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]
    assert is_eagle(config)


def test_the_draft_vocabulary_of_eagle1_lies_beside_it(tmp_path):
    head = head1()
    weights = head.weights.replace(head=head.weights.head[IDS], to_target=IDS)
    save_eagle(dataclasses.replace(head, weights=weights), tmp_path, jnp.float32)
    assert "d2t" not in load_file(tmp_path / "model.safetensors")
    found = load_eagle(tmp_path, TARGET).weights
    np.testing.assert_array_equal(found.to_target, IDS)
    np.testing.assert_array_equal(found.head, TARGET.params.head[IDS])
    draft = jspec.load_drafter(tmp_path, TARGET)
    ours = jspec.generate(TARGET, draft, [[5, 9, 2]], max_new_tokens=8)
    plain = jspec.generate(TARGET, None, [[5, 9, 2]], max_new_tokens=8)
    assert ours.tokens == plain.tokens
    save_file({"ids": np.array([3, 96])}, tmp_path / TOKEN_MAP)
    with pytest.raises(ValueError, match="does not name 2 different ids below 96"):
        load_eagle(tmp_path, TARGET)
    save_file({"map": np.array([3])}, tmp_path / TOKEN_MAP)
    with pytest.raises(ValueError, match=r"holds \['map'\]; it needs one array, ids"):
        load_eagle(tmp_path, TARGET)
    save_eagle(head, tmp_path, jnp.float32)  # drafts all, and leaves no map behind
    assert load_eagle(tmp_path, TARGET).weights.to_target is None


def test_official_eagle1_keys(tmp_path):
    save_eagle(head1(), tmp_path, jnp.float32, embedding=True)
    stored = load_file(tmp_path / "model.safetensors")
    expected = {f"layers.0.{name}" for name in LAYER}
    assert stored.keys() == expected | {"fc.weight", "fc.bias", "embed_tokens.weight"}
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["bias"], config["num_hidden_layers"]) == (True, 1)
    assert is_eagle(config)


@pytest.mark.parametrize(
    "name", ["spec_eagle3_llama", "spec_eagle3_qwen3_2l_fcnorm", "spec_peagle_llama"]
)
def test_speculators_keys_and_config_are_theirs(name, tmp_path):
    save_eagle(load_eagle(DATA / name, TARGET), tmp_path, jnp.float32)
    theirs = load_file(DATA / name / "model.safetensors")
    ours = load_file(tmp_path / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for key, array in theirs.items():
        np.testing.assert_array_equal(ours[key], array)
        assert ours[key].dtype == array.dtype
    read = [
        json.loads((f / "config.json").read_text()) for f in (tmp_path, DATA / name)
    ]
    fields = read[1].keys() - {"transformer_layer_config", "auto_map", "dtype"}
    fields -= {"transformers_version", "speculators_config"}
    assert {k: read[0][k] for k in fields} == {k: read[1][k] for k in fields}


@pytest.mark.parametrize("make", [head3, head1, lambda: head3(layout=SPECULATORS)])
def test_there_and_back(make, tmp_path):
    head = make()
    again = load_eagle(save_eagle(head, tmp_path, jnp.float32), TARGET)
    assert (again.design, again.layout) == (head.design, head.layout)
    ours, theirs = (jax.tree.leaves_with_path(h.weights) for h in (head, again))
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    for (path, a), (_, b) in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=str(path))


def test_bfloat16_is_the_default(tmp_path):
    again = load_eagle(save_eagle(head3(), tmp_path), TARGET)
    fc = np.asarray(head3().weights.layers[0].qkv)
    np.testing.assert_allclose(again.weights.layers[0].qkv, fc, rtol=2**-8)


def broken(tmp_path, change):
    folder = tmp_path / "broken"
    shutil.copytree(DATA / "spec_eagle3_llama", folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("norm.weight"), "missing: norm.weight"),
        (lambda t: t.update(extra=np.zeros(2, np.float32)), "unexpected: extra"),
        (
            lambda t: t.update({"norm.weight": np.ones(3, np.float32)}),
            r"norm.weight is",
        ),
        (lambda t: t["d2t"].fill(90), "d2t does not name 40 different ids"),
        (lambda t: t["t2d"].fill(False), "t2d and d2t name different"),
    ],
)
def test_damaged_heads_are_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        load_eagle(broken(tmp_path, change), TARGET)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(vocab_size=90), "96 tokens, but tiny has 90"),
        (dict(hidden=64, head_dim=16), "reads 96 numbers, but tiny"),
        (dict(layers=2), r"layers \[3\], but tiny has 2 layers"),
    ],
)
def test_heads_of_other_targets_are_refused(changes, message):
    sizes = dict(vocab_size=96, hidden=32, layers=6) | changes
    with pytest.raises(ValueError, match=message):
        load_eagle(DATA / "spec_eagle3_llama", tiny.model(**sizes))


def test_a_folder_without_a_head_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_eagle(tmp_path, TARGET)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        load_eagle(tmp_path, TARGET)


def test_what_a_layout_cannot_say_is_refused(tmp_path):
    head = head3()
    design = dataclasses.replace(head.design, norm_output=True)
    with pytest.raises(ValueError, match="official layout"):
        save_eagle(Head(design, head.weights), tmp_path)


def test_load_drafter_knows_a_head_by_its_folder(tmp_path):
    folder = save_eagle(head3(), tmp_path / "mine", jnp.float32)
    draft = jspec.load_drafter(str(folder), TARGET, gamma=2)
    assert (draft.name, draft.drafter.shape.depth) == ("mine", 2)
    assert draft.drafter.shape.dense
    tree = jspec.load_drafter(folder, TARGET)
    assert tree.drafter.shape.nodes > tree.drafter.shape.depth + 1
    with pytest.raises(TypeError, match="longest"):
        jspec.load_drafter(folder, TARGET, longest=3)
