"""Block-diffusion drafters in folders: keys, configs, there and back, and refusals."""

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
from jspec.drafters import block_reach, calibration, dspark
from jspec.drafters.dflash_configs import default_ids, is_dflash, layout_of
from jspec.drafters.published_dflash import TEMPERATURES, load_dflash, save_dflash
from jspec.drafters.reading import read_head
from jspec.testing import tiny
from jspec.train.block_starts import fresh_dflash, with_markov, with_selector

SMALL = tiny.model(vocab_size=24, hidden=32, layers=6)
TARGET = tiny.model(seed=1, vocab_size=96, hidden=32, layers=6)
IDS = np.arange(1, 81, 2, dtype=np.int32)
FIXTURES = {
    "dflash_v1": ("zlab", SMALL),
    "dflash_v1_swa": ("zlab", SMALL),
    "dflash_v2": ("zlab", SMALL),
    "spec_dflash": ("speculators", TARGET),
    "spec_dflash_draftvocab": ("speculators", TARGET),
    "spec_dspark_gated": ("speculators", TARGET),
    "spec_dspark_vanilla": ("speculators", TARGET),
    "specforge_dflash": ("zlab", TARGET),
    "specforge_dspark_vanilla": ("specforge", TARGET),
    "specforge_domino": ("specforge", TARGET),
}
# What says nothing about the drafter, or is said in another of several ways.
ASIDE = {"auto_map", "dtype", "torch_dtype", "transformers_version", "architectures"}
ASIDE |= {"speculators_config", "transformer_layer_config", "attention_dropout"}
ASIDE |= {"initializer_range", "use_cache", "pad_token_id", "max_window_layers"}


def plain(ids=None, layout="zlab", **changes):
    head = fresh_dflash(TARGET, (1, 3), ids, 95, jax.random.key(0), block=4)
    design = dataclasses.replace(head.design, **changes)
    return dataclasses.replace(head, design=design, layout=layout)


def spark(link=dspark.vanilla, ids=None, layout="specforge"):
    head = with_markov(plain(ids), jax.random.key(1), 8, link)
    return dataclasses.replace(head, layout=layout)


@pytest.mark.parametrize("name", FIXTURES)
def test_keys_and_config_are_theirs(name, tmp_path):
    layout, target = FIXTURES[name]
    theirs = json.loads((DATA / name / "config.json").read_text())
    assert is_dflash(theirs) and layout_of(theirs) == layout
    save_dflash(load_dflash(DATA / name, target), tmp_path, jnp.float32)
    ours = json.loads((tmp_path / "config.json").read_text())
    for key in theirs.keys() - ASIDE:
        own = dict(ours)
        if key == "dflash_config" and "block_size" not in ours[key]:
            own[key] = ours[key] | {"block_size": ours["block_size"]}
            own[key] = {k: own[key].get(k) for k in theirs[key]}
        assert own[key] == theirs[key], key
    stored = load_file(DATA / name / "model.safetensors")
    written = load_file(tmp_path / "model.safetensors")
    assert stored.keys() == written.keys()
    for key, array in stored.items():
        np.testing.assert_array_equal(written[key], array, err_msg=key)
        assert written[key].dtype == array.dtype


HEADS = {
    "zlab": plain,
    "zlab-vocabulary": lambda: plain(IDS),
    "zlab-causal": lambda: plain(causal=(True, True), embed_scale=2.0),
    "zlab-dflash2": lambda: with_selector(plain(), jax.random.key(3), 8, count=6),
    "specforge": lambda: spark(ids=IDS),
    "deepspec": lambda: plain(layout="deepspec", next_token=True),
    "deepspec-rnn": lambda: spark(dspark.rnn, layout="deepspec"),
    "speculators": lambda: plain(IDS, "speculators", reach=block_reach.by_anchor),
    "speculators-dspark": lambda: dataclasses.replace(
        spark(dspark.gated, IDS, "speculators"),
        design=dataclasses.replace(
            spark(dspark.gated).design, reach=block_reach.by_anchor
        ),
    ),
}


@pytest.mark.parametrize("name", HEADS)
def test_there_and_back(name, tmp_path):
    head = HEADS[name]()
    again = read_head(save_dflash(head, tmp_path, jnp.float32), TARGET)
    if head.layout == "specforge":  # which cuts windows otherwise, if it had any
        head = dataclasses.replace(
            head,
            design=dataclasses.replace(head.design, reach=block_reach.context_only),
        )
    assert (again.design, again.layout) == (head.design, head.layout)
    ours, theirs = (jax.tree.leaves_with_path(h.weights) for h in (head, again))
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    for (path, a), (_, b) in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=str(path))


def test_taps_are_counted_as_each_layout_does():
    """z-lab's 1 and 3 are outputs of layers, what is there after 2 and 4 of them."""
    assert load_dflash(DATA / "dflash_v1", SMALL).design.taps == (2, 4)
    assert load_dflash(DATA / "spec_dflash", TARGET).design.taps == (1, 3)
    assert default_ids(36, 5) == [1, 9, 17, 25, 33]
    assert default_ids(40, 5) == [1, 10, 19, 28, 37]
    assert default_ids(64, 5) == [1, 16, 31, 46, 61]
    assert default_ids(7, 1) == [3]


def changed(tmp_path, name, config=lambda c: None, tensors=lambda t: None):
    folder = tmp_path / "changed"
    shutil.copytree(DATA / name, folder)
    hf = json.loads((folder / "config.json").read_text())
    config(hf)
    (folder / "config.json").write_text(json.dumps(hf))
    stored = load_file(folder / "model.safetensors")
    tensors(stored)
    save_file(stored, folder / "model.safetensors")
    return folder


def test_other_names_of_the_same_tensors_are_known(tmp_path):
    def rename(stored):
        for key in list(stored):
            name = f"{key}.weight" if key.endswith("codebook") else key
            stored[f"model.{name}"] = stored.pop(key)

    folder = changed(tmp_path, "dflash_v2", tensors=rename)
    ours, theirs = (load_dflash(f, SMALL).weights for f in (folder, DATA / "dflash_v2"))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["dflash_config"].pop("mask_token_id"), "lacks mask_token_id"),
        (lambda c: c["dflash_config"].update(mask_token_id=24), "24 is not in the voc"),
        (lambda c: c["dflash_config"].pop("block_size"), "lacks block_size"),
        (
            lambda c: c["dflash_config"].update(target_layer_ids=[1, 5]),
            "layer 5, the t",
        ),
        (lambda c: c["dflash_config"].update(projector_type="x"), "projector_type 'x'"),
        (lambda c: c.update(num_target_layers=7), "7 layers"),
        (lambda c: c.update(vocab_size=30), "30 tokens, but tiny has 32 and 24"),
        (
            lambda c: c.update(layer_types=["sliding_attention"] * 2),
            "sliding_window",
        ),
    ],
)
def test_configs_that_do_not_add_up_are_refused(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_dflash(changed(tmp_path, "dflash_v1", change), SMALL)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("markov_head.gate_proj.bias"), "missing: markov_head.gate"),
        (lambda t: t.pop("fc.weight"), "missing: fc.weight"),
        (lambda t: t.update(extra=np.zeros(2, np.float32)), "unexpected: extra"),
        (
            lambda t: t.update({"norm.weight": np.ones(3, np.float32)}),
            r"norm.weight is \(3,\)",
        ),
    ],
)
def test_damaged_folders_are_refused(change, message, tmp_path):
    folder = changed(tmp_path, "spec_dspark_gated", tensors=change)
    with pytest.raises(ValueError, match=message):
        load_dflash(folder, TARGET)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (lambda: plain(next_token=True), "rows that guess the next token"),
        (lambda: spark(layout="zlab"), "a Markov or confidence head"),
        (lambda: plain(layout="deepspec"), "rows that guess their own position"),
        (lambda: plain(causal=(True, False)), r"causal as \[True, False\]"),
        (
            lambda: with_selector(plain(layout="specforge"), jax.random.key(0), 4),
            "a candidate selector",
        ),
    ],
)
def test_what_a_layout_cannot_say_is_refused(head, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        save_dflash(head(), tmp_path)


def test_blocks_longer_than_trained_are_refused():
    folder = DATA / "dflash_v1"  # six rows, the first of which guesses nothing
    for options in ({"gamma": 6}, {"gamma": 0}, {"gamma": 2, "rows": 2}, {"rows": 7}):
        with pytest.raises(ValueError, match=r"gamma is|rows;"):
            jspec.load_drafter(folder, SMALL, **options)
    draft = jspec.load_drafter(folder, SMALL, least=0.5)
    with pytest.raises(ValueError, match="has no confidence head"):
        jspec.generate(SMALL, draft, [[1, 2]], max_new_tokens=2)


def test_temperatures_are_fitted_and_lie_beside_the_head(tmp_path):
    random = np.random.default_rng(0)
    logit = random.normal(1.0, 1.5, (20000, 3))
    true = 1 / (1 + np.exp(-logit / np.array([0.4, 1.0, 2.5])))
    kept = np.cumprod(random.random(true.shape) < true, 1).sum(1)
    fitted = calibration.fit(calibration.Rounds(logit, kept))
    np.testing.assert_allclose(fitted.temperature, [0.4, 1.0, 2.5], rtol=0.3)
    assert (fitted.after < 0.015).all() and (fitted.after <= fitted.before).all()
    head = spark()
    fitted = fitted._replace(temperature=np.array([0.5, 1.0, 2.0, 4.0]))
    save_dflash(calibration.calibrated(head, fitted), tmp_path)
    found = load_dflash(tmp_path, TARGET).weights.confidence
    assert found.temperature.tolist() == [0.5, 1.0, 2.0, 4.0]
    scaled = dspark.scaled(found, jnp.full((1, 3), 2.0))
    assert scaled.tolist() == [[4.0, 2.0, 1.0]]
    (tmp_path / TEMPERATURES).write_text('{"temperatures": [1.0, 2.0]}')
    with pytest.raises(ValueError, match="the drafter needs 4"):
        load_dflash(tmp_path, TARGET)
    save_dflash(head, tmp_path)
    assert load_dflash(tmp_path, TARGET).weights.confidence.temperature is None


def test_confidences_are_recorded_with_what_was_kept():
    head = spark()
    bias = jnp.array([1.5])
    sure = head.weights.confidence.replace(bias=bias, temperature=jnp.full(4, 2.0))
    weights = head.weights.replace(confidence=sure)
    head = dataclasses.replace(head, weights=weights)
    rounds = calibration.record(TARGET, head, [[1, 2, 3], [4]], max_new_tokens=12)
    np.testing.assert_allclose(rounds.logit, 1.5, rtol=1e-5)  # no temperature yet
    assert len(rounds.kept) and (rounds.kept >= 0).all() and (rounds.kept <= 4).all()
