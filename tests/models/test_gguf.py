"""GGUF: quantised types, llama.cpp's rearrangements, metadata, errors."""

import dataclasses

import gguf
import ggufs
import jax
import numpy as np
import oracle
import pytest
from gguf import GGMLQuantizationType as Type

from jspec import models
from jspec.models.gguf import File, _Reader
from jspec.models.rope import frequencies

ARCHITECTURES = {
    "llama": ("llama", {"mlp_bias": False, "head_dim": 8}),
    "qwen2": ("qwen2", {"use_sliding_window": False, "sliding_window": None}),
    "qwen3": ("qwen3", {"attention_bias": False}),
    "gemma3": ("gemma3", {"num_hidden_layers": 7, "layer_types": None}),
}


def leaves(params):
    return jax.tree.leaves(params)


def small(**changes):
    """A Llama whose rows fit blocks of 32."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    plain = {"attention_bias": False, "mlp_bias": False}
    return oracle.build("llama", **(sizes | plain | changes))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_architecture_equals_its_safetensors(arch, tmp_path):
    family, changes = ARCHITECTURES[arch]
    if arch == "gemma3":
        changes = changes | {"query_pre_attn_scalar": 12}
        changes = changes | {"final_logit_softcapping": None}
    hf = oracle.build(family, **changes)
    expected = models.load(oracle.save(hf, tmp_path / "hf"))
    model = models.load(ggufs.write(tmp_path / "x.gguf", hf, arch))
    for field in dataclasses.fields(model.config):
        a = getattr(model.config, field.name)
        assert a == getattr(expected.config, field.name), field.name
    for a, b in zip(leaves(model.params), leaves(expected.params), strict=True):
        # Gemma's norms lose a bit on the way: they are stored as 1 + w.
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-7 if arch == "gemma3" else 0)
    ids = oracle.tokens(16)
    gap = np.abs(oracle.logits(model, ids) - oracle.hf_logits(hf, ids)).max()
    assert gap < 1e-4
    assert model.tokenizer is None


QUANTS = ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]


@pytest.mark.parametrize("kind", QUANTS)
def test_type_that_the_package_can_write(kind, tmp_path):
    hf, kind = small(), Type[kind]
    model = models.load(ggufs.write(tmp_path / "x.gguf", hf, "llama", kind=kind))
    state = {k: v.numpy() for k, v in hf.state_dict().items()}

    def through(w):
        return gguf.quants.dequantize(gguf.quants.quantize(w, kind), kind)

    embed = state["model.embed_tokens.weight"]
    np.testing.assert_array_equal(model.params.embed, through(embed))
    assert 0 < np.abs(model.params.embed - embed).max() < 0.2
    layer = model.params.layers[0]
    up = state["model.layers.0.mlp.up_proj.weight"]
    np.testing.assert_array_equal(np.asarray(layer.mlp.gate_up)[1], through(up))
    # Rows are quantised one by one, so the order of rows does not matter.
    k = state["model.layers.0.self_attn.k_proj.weight"]
    np.testing.assert_array_equal(
        np.asarray(layer.qkv)[:, 2].reshape(k.shape), through(k)
    )
    np.testing.assert_array_equal(
        layer.attn_norm, state["model.layers.0.input_layernorm.weight"]
    )


# K-quants: blocks of 256 written by hand, after ggml's definitions (ggml-common.h).
D, DMIN = np.float16(0.5), np.float16(0.25)
RNG = np.random.default_rng(0)


def six_bit_scales(scale, least):
    """Eight 6-bit scales and minima in twelve bytes."""
    out = np.zeros(12, np.uint8)
    out[0:4] = scale[:4] | (scale[4:] >> 4) << 6
    out[4:8] = least[:4] | (least[4:] >> 4) << 6
    out[8:12] = (scale[4:] & 15) | (least[4:] & 15) << 4
    return out


def q4_k():
    q = RNG.integers(0, 16, (8, 32)).astype(np.uint8)
    scale, least = RNG.integers(0, 64, (2, 8)).astype(np.uint8)
    packed = (q[0::2] | q[1::2] << 4).reshape(-1)
    head = np.array([D, DMIN]).view(np.uint8)
    block = np.concatenate([head, six_bit_scales(scale, least), packed])
    values = 0.5 * scale[:, None] * q - 0.25 * least[:, None].astype(np.float32)
    return block, values.reshape(-1)


def q5_k():
    q = RNG.integers(0, 32, (8, 32)).astype(np.uint8)
    scale, least = RNG.integers(0, 64, (2, 8)).astype(np.uint8)
    low = q & 15
    packed = (low[0::2] | low[1::2] << 4).reshape(-1)
    high = np.bitwise_or.reduce((q >> 4) << np.arange(8, dtype=np.uint8)[:, None])
    head = np.array([D, DMIN]).view(np.uint8)
    block = np.concatenate([head, six_bit_scales(scale, least), high, packed])
    values = 0.5 * scale[:, None] * q - 0.25 * least[:, None].astype(np.float32)
    return block, values.reshape(-1)


def q6_k():
    q = RNG.integers(0, 64, (2, 4, 32)).astype(np.uint8)  # halves of 4 x 32
    scale = RNG.integers(-128, 128, 16).astype(np.int8)
    low, high = q & 15, q >> 4
    packed = np.stack(
        [low[:, 0] | low[:, 2] << 4, low[:, 1] | low[:, 3] << 4], axis=1
    ).reshape(-1)
    top = (high << np.array([0, 2, 4, 6], np.uint8)[:, None]).sum(1, dtype=np.uint8)
    block = np.concatenate(
        [packed, top.reshape(-1), scale.view(np.uint8), np.array([D]).view(np.uint8)]
    )
    values = 0.5 * scale[:, None] * (q.reshape(16, 16).astype(np.float32) - 32)
    return block, values.reshape(-1)


@pytest.mark.parametrize("kind, make", [("Q4_K", q4_k), ("Q5_K", q5_k), ("Q6_K", q6_k)])
def test_k_quants_of_known_blocks(kind, make, tmp_path):
    hf = small(hidden_size=256, head_dim=64, num_hidden_layers=1)
    blocks, values = zip(*(make() for _ in range(101)), strict=True)
    raw = {"token_embd.weight": (np.stack(blocks), Type[kind])}
    model = models.load(ggufs.write(tmp_path / "x.gguf", hf, "llama", raw=raw))
    np.testing.assert_array_equal(model.params.embed, np.stack(values))


def test_a_large_tensor_is_read_in_pieces(tmp_path, monkeypatch):
    hf = small(tie_word_embeddings=True)
    path = ggufs.write(tmp_path / "x.gguf", hf, "llama", kind=Type.Q8_0)
    whole = models.load(path)
    monkeypatch.setattr("jspec.models.gguf._ROWS", 7)
    pieces = models.load(path)
    for a, b in zip(leaves(whole.params), leaves(pieces.params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_fast_reader_reads_what_the_package_reads(tmp_path):
    def extra(writer):
        writer.add_array("x.strings", ["", "a", "Ġé漢字", "a" * 300])
        writer.add_array("x.ints", [1, 2, 3])
        writer.add_array("x.floats", [0.5, -1.5])
        writer.add_array("x.bools", [True, False])
        writer.add_string("x.text", "é")
        writer.add_float32("x.float", 1e-5)

    path = ggufs.write(tmp_path / "x.gguf", small(), "llama", extra=extra)
    ours, theirs = _Reader(path), gguf.GGUFReader(path)
    assert list(ours.fields) == list(theirs.fields)
    for key, field in theirs.fields.items():
        assert ours.fields[key].contents() == field.contents(), key
        assert ours.fields[key].types == field.types, key
    for a, b in zip(ours.tensors, theirs.tensors, strict=True):
        assert a.name == b.name
        np.testing.assert_array_equal(a.data, b.data)


# Metadata.


def load_config(tmp_path, hf, arch="llama", **options):
    return models.load(ggufs.write(tmp_path / "x.gguf", hf, arch, **options)).config


def test_eos_ids_of_text_turn_and_message(tmp_path):
    def extra(writer):
        writer.add_eot_token_id(7)
        writer.add_uint32("tokenizer.ggml.eom_token_id", 2)

    assert load_config(tmp_path, small(), extra=extra).eos_ids == (2, 7)


def test_epsilon_is_the_decimal_it_was(tmp_path):
    assert load_config(tmp_path, small(rms_norm_eps=1e-5)).norm_eps == 1e-5


def test_yarn_and_linear_scaling(tmp_path):
    def yarn(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)

    def linear(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(2.0)

    rope = load_config(tmp_path, small(), extra=yarn).ropes[0]
    assert (rope.kind, rope.factor, rope.original) == ("yarn", 4.0, 64)
    assert rope.attention_factor == pytest.approx(0.1 * np.log(4.0) + 1)
    rope = load_config(tmp_path, small(), extra=linear).ropes[0]
    assert (rope.kind, rope.factor) == ("linear", 2.0)


def test_llama3_scaling_is_recovered_from_its_tensor(tmp_path):
    rope = models.config.Rope(500000.0, "llama3", 8.0, 8192, 1.0, 4.0)
    plain = dataclasses.replace(rope, kind="default")
    divisors = frequencies(plain, 128) / frequencies(rope, 128)
    hf = small(
        head_dim=128,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )

    def add(tensors):
        tensors["rope_freqs.weight"] = divisors.astype(np.float32)

    assert load_config(tmp_path, hf, change=add).ropes[0] == rope

    def spoil(tensors):
        tensors["rope_freqs.weight"] = np.sqrt(divisors).astype(np.float32)

    with pytest.raises(ValueError, match="rope_freqs.weight"):
        load_config(tmp_path, hf, change=spoil)


def test_llama_with_a_window_is_mistral(tmp_path):
    config = load_config(tmp_path, small(), extra=lambda w: w.add_sliding_window(16))
    assert config.family == "mistral"
    assert config.windows == (16,) * 3


def test_gemma3_pattern_from_the_file(tmp_path):
    def extra(writer):
        writer.add_array("gemma3.attention.sliding_window_pattern", [True, False, True])
        writer.add_float32("gemma3.rope.freq_base_swa", 3e4)

    hf = oracle.build("gemma3")
    config = load_config(tmp_path, hf, "gemma3", extra=extra)
    assert config.windows == (8, None, 8)
    assert [r.theta for r in config.ropes] == [3e4, 1e6, 3e4]


# What cannot be read.


@pytest.mark.parametrize("size", [0, 3, 20, 200, 1000, -1])
def test_truncated_file_is_named(size, tmp_path):
    path = ggufs.write(tmp_path / "x.gguf", small(), "llama")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"x.gguf is truncated or not a GGUF"):
        models.load(path)


BAD = [
    ("mamba", None, r"general.architecture = 'mamba'"),
    ("llama", lambda w: w.add_expert_count(8), "expert_count = 8"),
    ("llama", lambda w: w.add_uint16("split.count", 3), "one of 3 parts"),
    ("llama", lambda w: w.add_key_length(32), "heads of 32 with 16 rotated"),
    (
        "llama",
        lambda w: w.add_string("llama.rope.scaling.type", "longrope"),
        "longrope",
    ),
]


@pytest.mark.parametrize("arch, extra, message", BAD, ids=[m for *_, m in BAD])
def test_unsupported_file_is_refused_by_name(arch, extra, message, tmp_path):
    path = ggufs.write(tmp_path / "x.gguf", small(), arch, extra=extra)
    with pytest.raises(ValueError, match=message):
        models.load(path)


def test_missing_and_unknown_tensors_are_named(tmp_path):
    path = tmp_path / "x.gguf"
    ggufs.write(path, small(), "llama", drop=["blk.1.ffn_up.weight"])
    with pytest.raises(ValueError, match=r"lacks tensor model.layers.1.mlp.up_proj"):
        models.load(path)
    extra = {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}
    ggufs.write(path, small(), "llama", change=lambda t: t.update(extra))
    with pytest.raises(ValueError, match=r"no place for: blk.0.attn_sinks.weight"):
        models.load(path)


def test_type_that_cannot_be_dequantised_is_named(tmp_path):
    hf = small()
    raw = {"output_norm.weight": (np.ones(64, np.int32), Type.I32)}
    path = ggufs.write(tmp_path / "x.gguf", hf, "llama", raw=raw)
    with pytest.raises(ValueError, match=r"tensor output_norm.weight has type I32"):
        models.load(path)


def test_missing_metadata_is_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.ones((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"lacks the key llama.embedding_length"):
        models.load(tmp_path / "x.gguf")


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="x.gguf"):
        models.load(tmp_path / "x.gguf")


def test_open_file_lists_names_and_shapes(tmp_path):
    hf = small()
    file = File(ggufs.write(tmp_path / "x.gguf", hf, "llama"))
    assert file.tensors == {k: tuple(v.shape) for k, v in hf.state_dict().items()}
