"""The published layout: recorded outputs of the original code, round trips, refusals."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import jspec
from jspec import tree, verify
from jspec.drafters import load_medusa, save_medusa
from jspec.drafters.heads import medusa_output
from jspec.drafters.published_medusa import WEIGHTS
from jspec.models import transformer
from jspec.testing import tiny

PARITY = Path(__file__).parents[1] / "data" / "parity"
TARGET = jspec.load(PARITY / "medusa_target")
RECORDED = load_file(PARITY / "medusa_fit" / "io.safetensors")
# The original prefill yields a first token, from which its rounds start.
PROMPT = RECORDED["greedy_main"][0, : RECORDED["prompt"].shape[1] + 1].tolist()
LENGTH = RECORDED["greedy_main"].shape[1]
# Enough that the recorded text ends before the last round, whose drafts are cut.
NEW = LENGTH - len(PROMPT) + 5
THREE = tree.line(3)
# The recordings do not name their trees. These fit the two versions: a product of best
# guesses in the first, what three heads can fill of the published tree in the second.
PRODUCT = tree.expansion([4, 3, 2])
LISTED = tree.from_paths(path for path in tree.MEDUSA_63.paths if len(path) <= 3)


def test_heads_compute_what_the_original_code_computes():
    recorded = load_file(PARITY / "medusa_L1" / "io.safetensors")
    weights = load_medusa(PARITY / "medusa_L1", TARGET, THREE).params
    for k, expected in enumerate(recorded["logits"]):
        output = medusa_output(weights, k, jnp.asarray(recorded["hidden"]))
        logits = output @ weights.heads[k].vocab.T
        np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=2e-5)


def generate(topology, **options):
    draft = load_medusa(PARITY / "medusa_fit", TARGET, topology)
    options = dict(max_new_tokens=NEW, eos_ids=()) | options
    return jspec.generate(TARGET, draft, [PROMPT], **options)


@pytest.mark.parametrize(("version", "topology"), [("v01", PRODUCT), ("main", LISTED)])
def test_the_greedy_loop_gives_the_recorded_text(version, topology):
    out = generate(topology)
    text = (PROMPT + out.tokens[0])[:LENGTH]
    assert text == RECORDED[f"greedy_{version}"][0].tolist()
    # The heads were fitted to this text: a guess one place off would never be right.
    assert out.stats.acceptance_by_depth == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(("version", "topology"), [("v01", PRODUCT), ("main", LISTED)])
def test_typical_acceptance_gives_the_recorded_text(version, topology):
    out = generate(topology, temperature=1.0, rule=verify.lossy.typical())
    text = (PROMPT + out.tokens[0])[:LENGTH]
    assert text == RECORDED[f"typical_{version}"][0].tolist()


def test_the_recorded_typical_text_is_not_the_greedy_one():
    assert (RECORDED["typical_v01"] != RECORDED["greedy_v01"]).any()


# Saving and loading


def same(a, b):
    assert len(a.heads) == len(b.heads) and a.layers == b.layers
    for one, other in zip(a.heads, b.heads, strict=True):
        for field in ("weight", "bias", "vocab"):
            np.testing.assert_array_equal(getattr(one, field), getattr(other, field))


@pytest.mark.parametrize("layers", [1, 3])
def test_saved_heads_load_back_unchanged(tmp_path, layers):
    weights = load_medusa(PARITY / "medusa_fit", TARGET, THREE).params
    weights = weights.replace(layers=layers)
    folder = save_medusa(weights, tmp_path / "heads", base="tiny")
    same(load_medusa(folder, TARGET, THREE).params, weights)
    assert json.loads((folder / "config.json").read_text()) == {
        "base_model_name_or_path": "tiny",
        "medusa_num_heads": 3,
        "medusa_num_layers": layers,
    }


def test_saving_keeps_the_published_keys_and_values(tmp_path):
    weights = load_medusa(PARITY / "medusa_L1", TARGET, THREE).params
    saved = load_file(save_medusa(weights, tmp_path) / WEIGHTS)
    published = load_file(PARITY / "medusa_L1" / "model.safetensors")
    assert saved.keys() == published.keys()
    for key, x in published.items():
        np.testing.assert_array_equal(saved[key], x)


def test_a_torch_file_loads_where_torch_is(tmp_path, monkeypatch):
    tensors = load_file(PARITY / "medusa_fit" / "model.safetensors")
    shutil.copy(PARITY / "medusa_fit" / "config.json", tmp_path)
    file = tmp_path / "medusa_lm_head.pt"
    torch.save({key: torch.from_numpy(x) for key, x in tensors.items()}, file)
    expected = load_medusa(PARITY / "medusa_fit", TARGET, THREE).params
    same(load_medusa(tmp_path, TARGET, THREE).params, expected)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        ImportError, match="torch is not installed.* to model.safetensors"
    ):
        load_medusa(tmp_path, TARGET, THREE)


# Folders that are not what they should be


def folder(tmp_path, config=(), change=lambda tensors: None):
    """A copy of ``medusa_L1`` with another config and other tensors."""
    published = json.loads((PARITY / "medusa_L1" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(published | dict(config)))
    tensors = dict(load_file(PARITY / "medusa_L1" / "model.safetensors"))
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_a_config_may_announce_fewer_heads_than_the_file_holds(tmp_path):
    """Published ones do."""
    draft = load_medusa(folder(tmp_path, {"medusa_num_heads": 2}), TARGET, THREE)
    assert len(draft.params.heads) == 3


def drop(*keys):
    def change(tensors):
        for key in keys:
            del tensors[key]

    return change


def put(**shapes):
    def change(tensors):
        for key, shape in shapes.items():
            tensors[key.replace("_", ".")] = np.zeros(shape, np.float32)

    return change


def unequal_blocks(tensors):
    for i in range(3):
        tensors[f"{i}.2.weight"] = tensors.pop(f"{i}.1.weight")
        tensors[f"{i}.1.linear.weight"] = tensors[f"{i}.0.linear.weight"]
        tensors[f"{i}.1.linear.bias"] = tensors[f"{i}.0.linear.bias"] + (i == 2)


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (
            {},
            drop("0.0.linear.bias", "2.1.weight"),
            "missing: 0.0.linear.bias, 2.1.weight; unexpected: none",
        ),
        (
            {"medusa_num_heads": 4},
            drop(),
            "missing: 3.0.linear.bias, 3.0.linear.weight, 3.1.weight;",
        ),
        ({}, put(token_map=(9,)), "missing: none; unexpected: token.map"),
        ({}, put(**{"0_1_bias": (97,)}), "unexpected: 0.1.bias"),
        ({}, put(**{"1_1_weight": (96, 32)}), r"1.1.weight is \(96, 32\)"),
        ({"medusa_num_layers": 2}, unequal_blocks, "2.1.linear.bias differs from 2.0"),
        ({"medusa_num_heads": 0}, drop(), "medusa_num_heads must be .* got 0"),
    ],
)
def test_damaged_folders_are_refused(tmp_path, config, change, message):
    with pytest.raises(ValueError, match=message):
        load_medusa(folder(tmp_path, config, change), TARGET, THREE)


def test_missing_files_and_fields_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no config.json"):
        load_medusa(tmp_path, TARGET)
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 3}')
    with pytest.raises(ValueError, match=r"lacks \['medusa_num_layers'\]"):
        load_medusa(tmp_path, TARGET)
    shutil.copy(PARITY / "medusa_L1" / "config.json", tmp_path)
    with pytest.raises(FileNotFoundError, match="no model.safetensors"):
        load_medusa(tmp_path, TARGET)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 48}, "width 32 for 97 tokens, but tiny has width 48"),
        ({"vocab_size": 90}, "97 tokens, but tiny has width 32 and 90 tokens"),
    ],
)
def test_heads_of_another_target_are_refused(changes, message):
    config = tiny.config(**{"vocab_size": 97, **changes})
    target = dataclasses.replace(TARGET, name="tiny", target=transformer.target(config))
    with pytest.raises(ValueError, match=message):
        load_medusa(PARITY / "medusa_L1", target, THREE)


def test_the_published_tree_needs_a_fourth_head():
    with pytest.raises(ValueError, match="4 levels deep, but there are 3 heads"):
        load_medusa(PARITY / "medusa_L1", TARGET)


# vLLM's layout


def reduced():
    """Heads whose rows stand for every third token."""
    weights = load_medusa(PARITY / "medusa_fit", TARGET, THREE).params
    ids = np.arange(0, 97, 3)
    heads = tuple(h.replace(vocab=h.vocab[ids]) for h in weights.heads)
    return weights.replace(heads=heads, to_target=jnp.asarray(ids))


def test_a_draft_vocabulary_is_saved_as_vllm_does(tmp_path):
    weights = reduced()
    save_medusa(weights, tmp_path, base="tiny", vocab_size=97)
    stored = load_file(tmp_path / "model.safetensors")
    assert {key: x.shape for key, x in stored.items()} == {
        **{f"blocks.{i}.layers.0.weight": (32, 32) for i in range(3)},
        **{f"blocks.{i}.layers.0.bias": (32,) for i in range(3)},
        **{f"lm_heads.{i}.weight": (33, 32) for i in range(3)},
        "token_map": (33,),
    }
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "base_model_name_or_path": "tiny",
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": 32,
        "vocab_size": 97,
        "truncated_vocab_size": 33,
        "num_heads": 3,
        "num_hidden_layers": 1,
        "medusa_fc_bias": True,
    }
    loaded = load_medusa(tmp_path, TARGET, THREE).params
    same(loaded, weights)
    np.testing.assert_array_equal(loaded.to_target, weights.to_target)
    with pytest.raises(ValueError, match="saved with vocab_size"):
        save_medusa(weights, tmp_path)


def test_whole_products_are_cut_to_the_token_map(tmp_path):
    """vLLM takes the rows itself where a file holds all of them; so do we."""
    weights = reduced()
    save_medusa(weights, tmp_path, vocab_size=97)
    whole = load_medusa(PARITY / "medusa_fit", TARGET, THREE).params
    stored = dict(load_file(tmp_path / "model.safetensors"))
    for i, head in enumerate(whole.heads):
        del stored[f"blocks.{i}.layers.0.bias"]
        stored[f"lm_heads.{i}.weight"] = np.asarray(head.vocab)
    named = {f"medusa_heads.{k}": x for k, x in stored.items() if k != "token_map"}
    save_file(
        named | {"token_map": stored["token_map"]}, tmp_path / "model.safetensors"
    )
    config = json.loads((tmp_path / "config.json").read_text())
    del config["medusa_fc_bias"]  # its default is False
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load_medusa(tmp_path, TARGET, THREE).params
    np.testing.assert_array_equal(loaded.heads[1].vocab, weights.heads[1].vocab)
    assert not loaded.heads[1].bias.any()


@pytest.mark.parametrize(
    ("config", "ids", "message"),
    [
        ({"original_lm_head": True}, range(0, 97, 3), "original_lm_head"),
        ({}, [*range(32), 97], "token_map does not name 33 different ids below 97"),
    ],
)
def test_what_vllm_heads_may_not_be(tmp_path, config, ids, message):
    save_medusa(reduced(), tmp_path, vocab_size=97)
    stored = dict(load_file(tmp_path / "model.safetensors"))
    stored["token_map"] = np.array(ids)
    save_file(stored, tmp_path / "model.safetensors")
    published = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(published | config))
    with pytest.raises(ValueError, match=message):
        load_medusa(tmp_path, TARGET, THREE)
