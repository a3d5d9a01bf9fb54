"""Prediction modules in published folders: exact keys, there and back, clear refusals."""

import json

import jax
import jax.numpy as jnp
import mtp_oracle as oracle
import numpy as np
import pytest
from parity import DATA
from safetensors.numpy import load_file, save_file

import jspec
from jspec.drafters import growth, mtp
from jspec.drafters.published_mtp import Modules, is_mtp, load_mtp, save_mtp
from jspec.testing import tiny
from jspec.train.starts import fresh_mtp

STRANGER = tiny.model(vocab_size=96, hidden=32)
NEXT = "spec_mtp_qwen3_next"


def edit(folder, change):
    """Applies ``change`` to the tensors of a folder."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file)


def copy(name, folder):
    for file in ("config.json", "model.safetensors"):
        (folder / file).write_bytes((DATA / name / file).read_bytes())
    return folder


def native(folder, by_expert):
    """The recorded Qwen3-Next module as a target's own checkpoint holds it."""
    hf = json.loads((DATA / NEXT / "config.json").read_text())
    config = hf["transformer_layer_config"] | {"mtp_num_hidden_layers": 1}
    wrapped = {"model_type": "qwen3_next_vl", "text_config": config}
    (folder / "config.json").write_text(json.dumps(wrapped))
    names = {
        "token_layernorm": "mtp.pre_fc_norm_embedding",
        "hidden_layernorm": "mtp.pre_fc_norm_hidden",
        "input_proj": "mtp.fc",
        "final_layernorm": "mtp.norm",
    }
    out = {"model.embed_tokens.weight": np.zeros((96, 32), np.float32)}
    for key, x in load_file(DATA / NEXT / "model.safetensors").items():
        if key == "verifier_lm_head.weight":
            continue
        name = key.removeprefix("mtp_layers.0.")
        stem = name.removesuffix(".weight")
        name = f"{names[stem]}.weight" if stem in names else f"mtp.layers.0.{name}"
        parts = {name: x}
        if by_expert and "mlp.experts." in name:
            start, kind = name.rsplit(".", 1)
            halves = ["gate", "up"] if kind == "gate_up_proj" else ["down"]
            parts = {
                f"{start}.{e}.{half}_proj.weight": np.ascontiguousarray(w)
                for e, both in enumerate(x)
                for half, w in zip(halves, np.split(both, len(halves)), strict=True)
            }
        out |= parts
    save_file(out, folder / "model.safetensors")
    return folder


def assert_same(ours, theirs):
    assert ours.design == theirs.design
    a, b = (jax.tree.leaves(m.weights) for m in (ours, theirs))
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", ["spec_mtp_qwen3", NEXT])
def test_speculators_keys_and_config_are_theirs(name, tmp_path):
    modules = load_mtp(DATA / name, STRANGER)
    save_mtp(modules, tmp_path, jnp.float32)
    ours, theirs = (load_file(f / "model.safetensors") for f in (tmp_path, DATA / name))
    del theirs["verifier_lm_head.weight"]  # is the target's
    assert ours.keys() == theirs.keys()
    for key, x in theirs.items():
        np.testing.assert_array_equal(ours[key], x)
    mine, published = (
        json.loads((f / "config.json").read_text()) for f in (tmp_path, DATA / name)
    )
    for key in ("architectures", "speculators_model_type", "num_nextn_predict_layers"):
        assert mine[key] == published[key]
    settings = mine["speculators_config"]["proposal_methods"]
    assert settings == published["speculators_config"]["proposal_methods"]
    layer = mine["transformer_layer_config"]
    assert layer["model_type"] == published["transformer_layer_config"]["model_type"]
    assert is_mtp(mine) and is_mtp(published)
    assert_same(load_mtp(tmp_path, STRANGER), modules)


@pytest.mark.parametrize("by_expert", [True, False])
def test_qwen_checkpoints_hold_the_same_module(by_expert, tmp_path):
    folder = native(tmp_path, by_expert)
    assert is_mtp(json.loads((folder / "config.json").read_text()))
    assert_same(load_mtp(folder, STRANGER), load_mtp(DATA / NEXT, STRANGER))


def test_shards_are_read(tmp_path):
    folder = native(tmp_path, False)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards = {key: f"model-{i % 2}.safetensors" for i, key in enumerate(tensors)}
    for shard in set(shards.values()):
        save_file(
            {k: x for k, x in tensors.items() if shards[k] == shard}, folder / shard
        )
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    assert_same(load_mtp(folder, STRANGER), load_mtp(DATA / NEXT, STRANGER))


def test_the_order_of_mimo_is_turned_round(tmp_path):
    target, theirs = oracle.build("mimo", 1)
    folder = oracle.save(target, theirs, tmp_path / "target")
    model = jspec.load(folder, dtype="float32")
    modules = load_mtp(folder, model)
    saved = save_mtp(modules, tmp_path / "module", jnp.float32)
    again = load_mtp(saved, model)
    assert modules.design.first is mtp.hidden_first
    assert again.design.first is mtp.embedding_first
    hidden, embedded = np.split(np.asarray(modules.weights[0].fc), 2, 1)
    np.testing.assert_array_equal(again.weights[0].fc, np.hstack([embedded, hidden]))
    assert (
        json.loads((saved / "config.json").read_text())["transformer_layer_config"][
            "model_type"
        ]
        == "qwen2"
    )
    prompt, options = [5, 6, 7], dict(max_new_tokens=6, eos_ids=())
    plain = jspec.generate(model, None, [prompt], **options)
    for name, count in ((folder, 1), (saved, 2)):
        draft = jspec.load_drafter(name, model, gamma=count)
        assert (draft.drafter.shape.depth, draft.drafter.shape.dense) == (count, True)
        assert jspec.generate(model, draft, [prompt], **options).tokens == plain.tokens


def test_another_checkpoint_is_a_draft_model(tmp_path):
    target, theirs = oracle.build("mimo", 1)
    folder = oracle.save(target, theirs, tmp_path)
    model = tiny.model(vocab_size=101)
    draft = jspec.load_drafter(folder, model, gamma=1)
    assert draft.name == str(folder) and not draft.drafter.shape.taps


def test_missing_and_unexpected_keys_are_listed(tmp_path):
    def change(tensors):
        del tensors["mtp_layers.0.input_proj.weight"]
        del tensors["mtp_layers.0.self_attn.q_norm.weight"]
        return tensors | {"mtp_layers.0.extra": np.zeros(2, np.float32)}

    edit(copy("spec_mtp_qwen3", tmp_path), change)
    missing = "input_proj.weight, mtp_layers.0.self_attn.q_norm.weight"
    with pytest.raises(ValueError, match=f"{missing}; unexpected: mtp_layers.0.extra"):
        load_mtp(tmp_path, STRANGER)


def test_wrong_shapes_and_sizes_name_both_sides(tmp_path):
    copy("spec_mtp_qwen3", tmp_path)
    with pytest.raises(ValueError, match="with 96 tokens, but tiny has 61"):
        load_mtp(tmp_path, tiny.model(hidden=32))
    wide = tiny.model(vocab_size=96, hidden=48)
    with pytest.raises(ValueError, match="32 numbers a feature, but tiny has 48"):
        load_mtp(tmp_path, wide)

    def change(tensors):
        return tensors | {"mtp_layers.0.input_proj.weight": np.zeros((32, 32), "f4")}

    edit(tmp_path, change)
    with pytest.raises(ValueError, match=r"\(32, 32\), the config asks for \(32, 64\)"):
        load_mtp(tmp_path, STRANGER)


def test_folders_without_modules_are_refused(tmp_path):
    config = {"num_hidden_layers": 2, "vocab_size": 96, "hidden_size": 32}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config | {"model_type": "llama"}))
    with pytest.raises(ValueError, match="type llama.*known are deepseek_v3"):
        load_mtp(tmp_path, STRANGER)
    none = config | {"model_type": "deepseek_v3", "num_nextn_predict_layers": 0}
    file.write_text(json.dumps(none))
    with pytest.raises(ValueError, match="says that there are no prediction modules"):
        load_mtp(tmp_path, STRANGER)
    assert not is_mtp(none) and not is_mtp({"speculators_model_type": "eagle3"})


def test_several_modules_have_no_place_in_a_folder(tmp_path):
    one = fresh_mtp(STRANGER, jax.random.key(0))
    with pytest.raises(ValueError, match="2 modules.*holds one"):
        save_mtp(Modules(one.design, one.weights * 2), tmp_path)
    with pytest.raises(ValueError, match="0 modules"):
        mtp.drafter(one.design, growth.chain(2), 0)
    with pytest.raises(ValueError, match="config of 2 layers"):
        mtp.design_of(STRANGER.config)
