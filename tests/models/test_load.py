"""Loading and saving: folders, shards, single files, errors that name the cause."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import safetensors.numpy
import tokenizers
import transformers

from jspec import models
from jspec.models import names, tensorfile
from jspec.models.load import fetch as fetch_name
from jspec.testing import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An untied tiny Llama saved by transformers; tests copy what they change."""
    return oracle.save(oracle.build("llama"), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def copy(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def read(folder):
    return safetensors.numpy.load_file(folder / "model.safetensors")


def rewrite(folder, change):
    tensors = read(folder)
    change(tensors)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")


def assert_same(a, b):
    assert a.config == b.config
    for x, y in zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def test_every_tensor_reaches_its_place(folder):
    model, tensors = models.load(folder), read(folder)
    table = names.places(model.config)
    assert set(table) == set(tensors)
    for name, place in table.items():
        array = np.asarray(names.lookup(model.params, place.path))
        np.testing.assert_array_equal(
            array[place.index].reshape(place.shape), tensors[name]
        )
    layer = model.params.layers[1]
    q = tensors["model.layers.1.self_attn.q_proj.weight"]
    # Query heads 2 and 3 share the second key head.
    np.testing.assert_array_equal(layer.qkv[1, 1], q[3 * 8 : 4 * 8])
    np.testing.assert_array_equal(
        layer.qkv[1, 2], tensors["model.layers.1.self_attn.k_proj.weight"][8:]
    )


def test_model_says_what_it_is(folder):
    model = models.load(str(folder))
    assert model.name == str(folder)
    assert model.tokenizer is None
    assert model.dtype == jnp.float32 == model.params.embed.dtype
    assert model.config is model.target.config
    assert (model.config.eos_ids, model.config.bos_id) == ((2,), 1)
    assert model.config.vocab_size == 101


def test_a_single_file_is_its_folder(folder):
    assert_same(models.load(folder / "model.safetensors"), models.load(folder))


def test_shards_are_one_model(folder, tmp_path):
    oracle.save(oracle.build("llama"), tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same(models.load(tmp_path), models.load(folder))
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=shard.name):
        models.load(tmp_path)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtype_casts_once_and_keeps_its_own_bits(folder, dtype, tmp_path):
    model, fine = models.load(folder, dtype=dtype), models.load(folder)
    assert model.dtype == jnp.dtype(dtype)
    for (path, x), y in zip(
        jax.tree.leaves_with_path(model.params),
        jax.tree.leaves(fine.params),
        strict=True,
    ):
        kept = jax.tree_util.keystr(path).endswith("norm")
        assert x.dtype == (jnp.float32 if kept else model.dtype)
        np.testing.assert_array_equal(x, y.astype(x.dtype))
    models.save(model, tmp_path)
    assert_same(models.load(tmp_path, dtype=dtype), model)


def test_dtype_that_is_none_of_ours(folder):
    with pytest.raises(ValueError, match="int8"):
        models.load(folder, dtype="int8")


def test_eos_ids_come_from_the_generation_config(copy):
    (copy / "generation_config.json").write_text('{"eos_token_id": [2, 7, 9]}')
    assert models.load(copy).config.eos_ids == (2, 7, 9)
    (copy / "generation_config.json").unlink()
    assert models.load(copy).config.eos_ids == (2,)


def test_tokenizer_beside_the_weights(copy, tmp_path):
    model = tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="?", eos_token="b"
    )
    wrapped.chat_template = "{{ messages[0].content }}"
    wrapped.save_pretrained(copy)
    loaded = models.load(copy)
    assert loaded.tokenizer("b a c")["input_ids"] == [1, 0, 2]
    assert loaded.tokenizer.eos_token_id == 1
    # Fewer ids than rows: the rows in excess stay part of the law.
    assert loaded.config.vocab_size == 101
    out = models.save(loaded, tmp_path / "out")
    again = models.load(out)
    assert again.tokenizer("b a c")["input_ids"] == [1, 0, 2]
    assert again.tokenizer.chat_template == wrapped.chat_template


# Damaged and incomplete checkpoints.


def test_missing_tensor_is_named(copy):
    rewrite(copy, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ValueError, match=r"lacks tensor model.layers.1.mlp.up_proj"):
        models.load(copy)


def test_each_tensor_in_turn_is_needed(copy):
    tensors = read(copy)
    for name in tensors:
        rest = {k: v for k, v in tensors.items() if k != name}
        safetensors.numpy.save_file(rest, copy / "model.safetensors")
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            models.load(copy)


def test_untied_without_a_head_is_an_error(copy):
    rewrite(copy, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(ValueError, match="lm_head.weight.*tie_word_embeddings"):
        models.load(copy)


def test_tied_with_a_copy_of_the_embedding(copy):
    oracle.edit_config(copy, lambda c: c.update(tie_word_embeddings=True))
    with pytest.raises(ValueError, match=r"lm_head.weight differs"):
        models.load(copy)
    rewrite(
        copy, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]})
    )
    assert models.load(copy).params.head is None


def test_left_over_tensor_is_named(copy):
    extra = {"model.layers.0.self_attn.q_norm.weight": np.ones(8, np.float32)}
    rewrite(copy, lambda t: t.update(extra))
    with pytest.raises(ValueError, match="no place for: model.layers.0.self_attn.q_no"):
        models.load(copy)


def test_stored_frequencies_are_not_needed(copy):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    rewrite(copy, lambda t: t.update(extra))
    models.load(copy)


def test_wrong_shape_names_both(copy):
    wrong = {"model.norm.weight": np.ones(33, np.float32)}
    rewrite(copy, lambda t: t.update(wrong))
    with pytest.raises(ValueError, match=r"model.norm.weight.*\(33,\).*\(32,\)"):
        models.load(copy)


def test_integer_tensor_is_refused(copy):
    wrong = {"model.norm.weight": np.ones(32, np.int32)}
    rewrite(copy, lambda t: t.update(wrong))
    with pytest.raises(ValueError, match=r"model.norm.weight has dtype I32"):
        models.load(copy)


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_truncated_file_is_named(copy, size):
    file = copy / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:size])
    with pytest.raises(ValueError, match=r"model.safetensors is truncated"):
        models.load(copy)


def test_a_file_that_is_something_else(copy):
    (copy / "model.safetensors").write_bytes(b"\x10" + b"\0" * 7 + b"x" * 64)
    with pytest.raises(ValueError, match="no readable safetensors header"):
        models.load(copy)


def test_missing_files_are_named(copy, tmp_path):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"no model.safetensors.*pytorch_model"):
        models.load(copy)
    with pytest.raises(FileNotFoundError, match=r"model.safetensors"):
        models.load(copy / "model.safetensors")
    (copy / "pytorch_model.bin").rename(copy / "model.safetensors")
    (copy / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is not valid JSON"):
        models.load(copy)
    (copy / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no config.json"):
        models.load(copy)
    with pytest.raises(FileNotFoundError, match="smollm2-135m"):
        models.load("no-such-model")
    (copy / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match="neither a .safetensors nor a .gguf"):
        models.load(copy / "notes.txt")
    with pytest.raises(ValueError, match="revision = 'main' needs a Hub id"):
        models.load(copy, revision="main")


def test_hub_that_cannot_be_reached(monkeypatch):
    import huggingface_hub

    def offline(name, revision, allow_patterns):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ConnectionError, match=r"'owner/name'.*no connection.*pass a"):
        models.load("owner/name", revision="main")


def test_hub_id_loads_the_snapshot(folder, monkeypatch):
    import huggingface_hub

    seen = {}

    def fetch(name, **kwargs):
        seen.update(kwargs, name=name)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    model = models.load("owner/name", revision="v1")
    assert (model.name, seen["name"], seen["revision"]) == ("owner/name",) * 2 + ("v1",)
    assert "*.safetensors" in seen["allow_patterns"]


@pytest.mark.parametrize("safe", [True, False])
def test_heads_come_from_the_hub_pickled_only_if_they_must(safe, tmp_path, monkeypatch):
    import huggingface_hub

    asked = []

    def fetch(name, revision, allow_patterns):
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    if safe:
        (tmp_path / "model.safetensors").touch()
    assert fetch_name("owner/head", pickled=True) == tmp_path
    assert not any("bin" in pattern for pattern in asked[0])
    assert len(asked) == (1 if safe else 2)
    assert safe or "*.bin" in asked[1]


# Saving.


@pytest.mark.parametrize("name", oracle.FAMILIES)
def test_what_is_saved_loads_in_transformers(name, tmp_path):
    hf = oracle.build(name)
    model = models.load(oracle.save(hf, tmp_path / "theirs"))
    out = models.save(model, tmp_path / "ours")
    assert_same(models.load(out), model)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        out, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys"))
    for key, value in hf.state_dict().items():
        np.testing.assert_array_equal(value, theirs.state_dict()[key], key)
    ids = oracle.tokens(24)
    np.testing.assert_array_equal(
        oracle.hf_logits(theirs.eval(), ids), oracle.hf_logits(hf, ids)
    )


def test_parts_are_saved_like_a_model(tmp_path):
    model = tiny.model()
    models.save((model.config, model.params), tmp_path / "a")
    assert_same(models.load(tmp_path / "a"), model)
    stored = safetensors.numpy.load_file(tmp_path / "a" / "model.safetensors")
    assert set(stored) == set(names.places(model.config))


def test_weights_that_do_not_fit_are_not_saved(tmp_path):
    model = tiny.model()
    bad = model.params.replace(final_norm=jnp.ones(3))
    with pytest.raises(ValueError, match=r"final_norm have shape \(3,\)"):
        models.save((model.config, bad), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_tensorfile_agrees_with_the_safetensors_package(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.normal(size=shape).astype(dtype)
        for name, shape, dtype in [
            ("a", (3, 5), np.float32),
            ("b", (7,), tensorfile.DTYPES["BF16"]),
            ("c", (2, 1, 3), np.float16),
            ("empty", (0, 4), np.float32),
        ]
    }
    file = tmp_path / "x.safetensors"
    specs = {name: (t.shape, t.dtype) for name, t in tensors.items()}
    tensorfile.write(file, specs, tensors.__getitem__)
    with safetensors.safe_open(file, "flax") as f:
        for name, expected in tensors.items():
            np.testing.assert_array_equal(f.get_tensor(name), expected)
    for name, stored in tensorfile.index(file).items():
        out = np.empty(stored.shape, tensors[name].dtype)
        tensorfile.read(name, stored, out)
        np.testing.assert_array_equal(out, tensors[name])


# Without torch, and in how much memory.

NO_TORCH = """
import sys
sys.modules["torch"] = None
from jspec import models
model = models.load(sys.argv[1])
models.save(model, sys.argv[2])
print(model.config.layers)
"""

PEAK = """
import sys
import jax
from transformers import AutoTokenizer
from jspec import models

def status(key):
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines[key].split()[0]) * 1024

models.load(sys.argv[1])  # the lazy imports
jax.clear_caches()
open("/proc/self/clear_refs", "w").write("5")  # forgets the old peak
before = status("VmRSS")
model = models.load(sys.argv[2])
weights = sum(x.nbytes for x in jax.tree.leaves(model.params))
print(weights, status("VmHWM") - before)
"""


def python(code, *args):
    out = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        timeout=300,
    )
    return out.stdout.split()


def test_no_torch_is_needed(folder, tmp_path):
    assert python(NO_TORCH, folder, tmp_path / "out") == ["3"]
    assert_same(models.load(tmp_path / "out"), models.load(folder))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_memory_is_the_weights_and_one_tensor(folder, tmp_path):
    """64 MB of weights, the largest tensor a fifth of them."""
    model = tiny.model(hidden=512, intermediate=1536, layers=4, vocab_size=6000)
    models.save(model, tmp_path)
    weights, peak = map(int, python(PEAK, folder, tmp_path))
    assert weights > 60e6
    assert peak < 1.5 * weights


def test_config_json_says_the_dtype(tmp_path):
    models.save(tiny.model(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert config["architectures"] == ["LlamaForCausalLM"]
