"""From a corpus to a head that drafts: every recipe, with and without a break."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from chats import EOS, chat_tokenizer

import jspec
from jspec import cli, models
from jspec.drafters.published_eagle import load_eagle
from jspec.drafters.published_mtp import load_mtp, save_mtp
from jspec.drafters.tensors import target_head
from jspec.testing import tiny
from jspec.train import metrics
from jspec.train.corpus import Corpus, Document, read
from jspec.train.recipes import RECIPES, vocabulary
from jspec.train.run import Options, train
from jspec.train.selfgen import selfgen
from jspec.train.starts import fresh_eagle1, fresh_eagle3, fresh_mtp, with_vocabulary

MODULE = "A_MODULE"  # stands for a folder
ENDS = (EOS, *range(100, 112))
MODEL = tiny.model(
    seed=3,
    tokenizer=chat_tokenizer(),
    vocab_size=258,
    layers=3,
    eos_ids=ENDS,
    max_position=128,
)
SMALL = dict(batch=2, length=48, warmup=3, every=10, held=2, lr=3e-3)
OWN = {
    "blockwise": {"draft_vocab": 200, "count": 2, "wide": 16},
    "dflash": {"draft_vocab": 200, "layers": 1, "block": 4, "anchors": 48},
    "dflash2": {"layers": 1, "block": 4, "rank": 8, "anchors": 48},
    "dspark": {"draft_vocab": 200, "layers": 1, "block": 3, "anchors": 48},
    "eagle1": {"draft_vocab": 200},
    "eagle3": {"draft_vocab": 200, "steps": 2, "taps": (0, 2, 3)},
    "medusa": {"draft_vocab": 200, "count": 2},
    "mtp": {"draft_vocab": 200},
    "small": {"hidden": 16, "layers": 1, "head_dim": 8},
}


# The labels of these are samples, which say little about the samples that are held out.
BY_LABELS = ("dflash", "dflash2")


def _mean_of_some(loss):
    """Over the batches that have any answer to learn from."""
    return np.mean([x for x in loss if x])


@pytest.fixture(scope="module")
def corpus_files(tmp_path_factory):
    out = tmp_path_factory.mktemp("corpus")
    return selfgen(MODEL, out, conversations=48, rows=8, user_cap=9, answer_cap=12)


@pytest.mark.parametrize(
    ("odd", "name"),
    [
        ({"sandwich_norm": True, "zero_centred": True}, "norms after attention"),
        ({"gated": True}, "gated attention"),
    ],
)
def test_layers_that_no_eagle_head_can_have_are_refused(odd, name):
    model = tiny.model(seed=1, **odd)
    for fresh in (fresh_eagle1, lambda m, k: fresh_eagle3(m, (0,), np.arange(5), k)):
        with pytest.raises(ValueError, match=f"tiny has {name}"):
            fresh(model, jax.random.key(0))


def test_methods_share_features(corpus_files, tmp_path):
    folder = str(tmp_path / "features")
    for method, out in (("eagle3", "a"), ("medusa", "b")):
        options = Options(steps=2, **SMALL, cache=folder, recipe=OWN[method])
        said = []
        train(method, MODEL, corpus_files, tmp_path / out, options, said.append)
        written = [line for line in said if line.startswith("features: ")]
        assert bool(written) == (method == "eagle3")


@pytest.mark.parametrize("method", RECIPES)
def test_a_head_learns_and_drafts(method, corpus_files, tmp_path):
    steps = 60 if method in BY_LABELS else 20
    options = Options(steps=steps, **SMALL, recipe=OWN[method])
    said = []
    head = train(method, MODEL, corpus_files, tmp_path, options, said.append)
    lines = metrics.read(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    if method in BY_LABELS:
        loss = [line["loss"] for line in lines]
        assert _mean_of_some(loss[-20:]) < _mean_of_some(loss[:20])
    else:
        assert lines[-1]["eval/loss"] < lines[9]["eval/loss"]
    draft = jspec.load_drafter(head, MODEL, gamma=2)
    prompts = [[1, 2, 3, 4], [9]]
    ours = jspec.generate(MODEL, draft, prompts, max_new_tokens=8, eos_ids=())
    plain = jspec.generate(MODEL, None, prompts, max_new_tokens=8, eos_ids=())
    assert ours.tokens == plain.tokens


def test_a_head_is_a_start(corpus_files, tmp_path):
    options = Options(steps=2, **SMALL, recipe=OWN["eagle3"])
    head = train("eagle3", MODEL, corpus_files, tmp_path, options)
    started = load_eagle(head, MODEL)
    corpus = read(corpus_files, MODEL.tokenizer)
    recipe = RECIPES["eagle3"](MODEL, corpus, start=started)
    np.testing.assert_array_equal(recipe.params.fc, started.weights.fc)
    np.testing.assert_array_equal(recipe.params.head, started.weights.head)
    assert recipe.taps == started.design.taps


def test_a_head_can_draft_other_tokens(corpus_files):
    """Rows of tokens that it knew are its own, the others the target's."""
    knew, wanted = np.arange(3, 240, 2), np.arange(100, 150)
    head = fresh_eagle3(MODEL, (0, 2, 3), knew, jax.random.key(0))
    own = dataclasses.replace(head.weights, head=1.0 + head.weights.head)
    head = dataclasses.replace(head, weights=own)
    weights = with_vocabulary(head, MODEL, wanted).weights
    np.testing.assert_array_equal(weights.to_target, wanted)
    rows = target_head(MODEL, wanted) + np.isin(wanted, knew)[:, None]
    np.testing.assert_allclose(weights.head, rows)
    corpus = read(corpus_files, MODEL.tokenizer)
    kept, other = (
        RECIPES["eagle3"](MODEL, corpus, draft_vocab=size, start=head).params.head
        for size in (None, 200)
    )
    np.testing.assert_array_equal(kept, own.head)
    assert len(other) == 200


def test_the_command_writes_a_corpus(tmp_path, capsys):
    target = str(models.save(MODEL, tmp_path / "target"))
    asked = tmp_path / "asked.jsonl"
    turns = [{"question_id": i, "category": "x", "turns": [f"go {i}"]} for i in (1, 2)]
    asked.write_text("".join(json.dumps(t) + "\n" for t in turns))
    words = ["selfgen", str(tmp_path / "out"), "--target", target, "--rows", "2"]
    words += ["--answer-cap", "9", "--temperatures", "0", "1", "--prompts", str(asked)]
    assert cli.main(words) == 0
    files = sorted((tmp_path / "out").glob("*.npz"))
    assert str(files[0]) in capsys.readouterr().err
    assert len(read(files, MODEL.tokenizer).documents) == 2
    assert cli.main([*words, "--seed", "1"]) == 2  # begun with another seed
    assert "seed" in capsys.readouterr().err


def test_the_command_trains_and_goes_on(corpus_files, tmp_path, capsys):
    target, out = models.save(MODEL, tmp_path / "target"), tmp_path / "run"
    words = ["train", "eagle3", "--target", str(target), "--out", str(out), "--smoke"]
    words += ["--length", "48", "--corpus", *map(str, corpus_files)]
    assert cli.main(words) == 0
    first = metrics.read(out / "metrics.jsonl")
    assert cli.main(words) == 0  # nothing is left to do
    assert metrics.read(out / "metrics.jsonl") == first
    assert cli.main(["inspect", str(out / "head"), "--target", str(target)]) == 0
    said = capsys.readouterr().out
    assert "eagle3" in said and "first guess right" in said


@pytest.mark.parametrize("method", [m for m in RECIPES if m != "small"])
def test_heads_are_exported(method, corpus_files, tmp_path, capsys):
    target = str(models.save(MODEL, tmp_path / "target"))
    options = Options(steps=1, **SMALL, recipe=OWN[method])
    head = train(method, MODEL, corpus_files, tmp_path, options, lambda line: None)
    words = ["export", str(head), str(tmp_path / "out"), "--target", target]
    assert cli.main([*words, "--dtype", "float32"]) == 0
    ours, theirs = (jspec.load_drafter(f, MODEL) for f in (head, tmp_path / "out"))
    for a, b in zip(*map(jax.tree.leaves, (ours.params, theirs.params)), strict=True):
        np.testing.assert_array_equal(a, b)
    status = cli.main([*words, "--layout", "speculators"])
    if method in ("eagle3", "dflash", "dflash2", "dspark"):
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert config["speculators_model_type"] == method
        assert status == 0
    else:
        assert status == 2
        why = "no place for an EAGLE-1" if method == "eagle1" else "is no EAGLE head"
        assert why in capsys.readouterr().err


def test_training_may_take_some_rows(corpus_files, tmp_path):
    def trained(out, **options):
        head = train(
            "medusa",
            MODEL,
            corpus_files,
            tmp_path / out,
            Options(steps=3, **SMALL, recipe=OWN["medusa"], **options),
            lambda line: None,
        )
        return metrics.read(head.parent / "metrics.jsonl")

    cached = trained("a", rows=4, cache=str(tmp_path / "features"))
    streamed, every = trained("b", rows=4), trained("c")
    losses = [[line["loss"] for line in run] for run in (cached, streamed, every)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=2e-3)  # kept in bfloat16
    assert losses[1] != losses[2]
    with pytest.raises(ValueError, match="rows must be an integer >= 2"):
        trained("d", rows=1)


def test_a_module_is_trained_further_and_inspected(corpus_files, tmp_path, capsys):
    target = str(models.save(MODEL, tmp_path / "target"))
    fresh = save_mtp(fresh_mtp(MODEL, jax.random.key(5)), tmp_path / "fresh")
    words = ["train", "mtp", "--target", target, "--out", str(tmp_path / "run")]
    words += ["--smoke", "--length", "48", "--corpus", *map(str, corpus_files)]
    assert cli.main([*words, "--start", str(fresh)]) == 0
    start, end = (load_mtp(f, MODEL) for f in (fresh, tmp_path / "run" / "head"))
    moved = np.abs(start.weights[0].fc - end.weights[0].fc).max()
    assert 0 < moved < 0.1
    module = str(tmp_path / "run" / "head")
    assert cli.main(["inspect", module, "--target", target, "--limit", "1"]) == 0
    said = capsys.readouterr().out
    assert "embedding_first" in said and "first guess right" in said


def test_eight_devices_train_as_one_does(corpus_files, tmp_path):
    target = str(models.save(MODEL, tmp_path / "target"))
    words = ["train", "medusa", "--target", target, "--length", "48", "--batch", "8"]
    words += ["--smoke", "--corpus", *map(str, corpus_files), "--out"]
    held = tmp_path / "eight"
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    subprocess.run(
        [sys.executable, "-m", "jspec", *words, str(held)],
        env=os.environ | {"XLA_FLAGS": flags},
        check=True,
    )
    assert cli.main([*words, str(tmp_path / "one")]) == 0
    one, eight = (
        metrics.read(tmp_path / f / "metrics.jsonl") for f in ("one", "eight")
    )
    assert len(one) == 6
    np.testing.assert_allclose(
        [line["loss"] for line in one], [line["loss"] for line in eight], rtol=1e-5
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["unknown"], "method 'unknown' is not one of"),
        (["eagle3", "--corpus", "/nowhere.npz"], "/nowhere.npz"),
        (["medusa", "--start", MODULE], "is no head that medusa could go on from"),
    ],
)
def test_mistakes_are_one_line(words, message, corpus_files, tmp_path, capsys):
    save_mtp(fresh_mtp(MODEL, jax.random.key(5)), tmp_path / "module")
    words = [w.replace(MODULE, str(tmp_path / "module")) for w in words]
    target = models.save(MODEL, tmp_path / "target")
    given = ["--corpus", str(corpus_files[0]), "--target", str(target)]
    out = ["--out", str(tmp_path / "run")]
    assert cli.main(["train", words[0], *given, *out, *words[1:]]) == 2
    assert message in capsys.readouterr().err


def test_vocabulary_is_the_most_frequent_ids_of_answers():
    mask = np.array([False, True, True, True, True])
    corpus = Corpus([Document(np.array([7, 5, 5, 2, 9]), mask)], "t", "")
    assert vocabulary(corpus, 2, 10).tolist() == [2, 5]
    assert vocabulary(corpus, 4, 10).tolist() == [0, 2, 5, 9]
    with pytest.raises(ValueError, match="draft vocabulary of 11"):
        vocabulary(corpus, 11, 10)
