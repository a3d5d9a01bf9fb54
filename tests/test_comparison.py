"""Comparisons, Spec-Bench files and stores from files, on tiny models."""

import argparse
import json
import types

import pytest

import jspec
from jspec import bench, cli_store, comparison, drafters, spec_bench
from jspec.comparison import Entry
from jspec.prompts import Question
from jspec.record import Method, Settings
from jspec.testing import tiny

MODEL = tiny.model(seed=3, layers=1)
LOOP = [5, 6, 7, 8, 9]
QUESTIONS = [Question(0, "code", LOOP * 4), Question(1, "chat", [1, 2, 3])]
ENTRY = Entry(
    "suffix", "suffix decoding", lambda model: jspec.Draft(drafters.suffix(3))
)
SETTINGS = Settings(max_new_tokens=8, smoke=True)


@pytest.fixture(scope="module")
def line():
    """One line of a comparison."""
    method = Method(ENTRY.name, ENTRY.make(MODEL))

    def more(one, pairs):
        return comparison.facts(MODEL, ENTRY, one, pairs, SETTINGS, 2)

    return bench.run(MODEL, [method], QUESTIONS, SETTINGS, more)[0]


def test_a_line_says_what_a_method_needs(line):
    assert line["lossless"] and line["family"] == "suffix decoding"
    assert not line["uses_features"]
    assert set(line["tasks"]) == {"code", "chat"}
    assert line["memory_mb"] == pytest.approx(4e-6)  # one score


def test_memory_leaves_out_what_the_target_has():
    own = drafters.self_model(tiny.model(seed=3), 1, 2)
    shared = comparison.memory(tiny.model(seed=3), own, [[1, 2]])
    model = tiny.model(seed=3)
    own = drafters.self_model(model, 1, 2)
    assert shared > 0 and comparison.memory(model, own, [[1, 2]]) == 0
    assert comparison.memory(model, None, [[1, 2]]) == 0


def test_a_second_start_finds_what_is_finished(line, tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_text(json.dumps(line) + "\n")
    assert comparison.finished(str(file), SETTINGS, "tiny", 2) == [line]
    assert comparison.finished(str(file), SETTINGS, "tiny", 3) == []
    hot = SETTINGS._replace(temperature=1.0)
    assert comparison.finished(str(file), hot, "tiny", 2) == []
    assert comparison.finished(str(tmp_path / "none"), SETTINGS, "tiny", 2) == []
    file.write_text("{")
    with pytest.raises(ValueError, match="line 1: not JSON"):
        comparison.finished(str(file), SETTINGS, "tiny", 2)


def test_table_and_figures_hold_every_method(line, tmp_path):
    other = line | {"method": "theirs", "tau": None, "acceptance_by_depth": []}
    other |= {"tasks": {}, "t_draft_ms": None}
    table = comparison.table([line, other])
    assert list(table.columns[0].cells) == ["suffix", "theirs"]
    drawn = comparison.plots([line, other], tmp_path / "figures")
    assert [p.name for p in drawn] == ["tasks.png", "cost.png", "depth.png"]
    assert all(p.stat().st_size > 1000 for p in drawn)


# Spec-Bench


class Words:
    """A tokenizer whose words are numbers."""

    chat_template = "words"

    def apply_chat_template(self, messages, **options):
        del options
        return [int(w) for m in messages for w in m["content"].split()]

    def decode(self, ids, **options):
        del options
        return " ".join(map(str, ids))

    def __call__(self, text):
        return {"input_ids": text.split()}


@pytest.fixture(scope="module")
def answers():
    model = tiny.model(seed=3, layers=1, tokenizer=Words())
    asked = [
        spec_bench.Asked(81, "writing", ["5 6 7 5 6 7", "1 2"]),
        spec_bench.Asked(241, "summarization", ["4 5 4 5"]),
    ]
    options = dict(max_new_tokens=12, slots=64, eos_ids=())

    def run(draft, name):
        return [spec_bench.answer(model, draft, q, name, **options) for q in asked]

    too_long = spec_bench.Asked(1, "qa", ["5 " * 60])
    assert spec_bench.answer(model, None, too_long, "plain", **options) is None
    return run(None, "vanilla"), run(jspec.Draft(drafters.suffix(3)), "suffix")


def test_answers_have_the_fields_of_spec_bench(answers):
    for lines in answers:
        turns = lines[0]["choices"][0]
        assert lines[0]["question_id"] == 81 and lines[0]["category"] == "writing"
        assert len(turns["turns"]) == 2 and turns["new_tokens"] == [12, 12]
        assert len(turns["accept_lengths"]) == sum(turns["decoding_steps"])
        assert sum(turns["accept_lengths"]) == 24
        assert all(seconds > 0 for seconds in turns["wall_time"])


def test_scores_follow_speed_py(answers):
    plain, ours = answers
    for line, seconds in zip(ours, ([2.0, 2.0], [1.0]), strict=True):
        line["choices"][0]["wall_time"] = line["choices"][0]["decode_time"] = seconds
    for line, seconds in zip(plain, ([4.0, 4.0], [3.0]), strict=True):
        line["choices"][0]["wall_time"] = line["choices"][0]["decode_time"] = seconds
    found = spec_bench.scores(ours, plain, lambda text: len(text.split()))
    assert set(found) == {"mt_bench", "summarization", "overall"}
    # 24 tokens in 4 s against 24 in 8 s, of which speed.py counts 22.
    assert found["mt_bench"].corrected == pytest.approx(2)
    assert found["mt_bench"].published == pytest.approx(2 * 24 / 22)
    assert found["overall"].corrected == pytest.approx((6 + 12) / (3 + 4))
    assert found["overall"].same
    steps = [n for line in ours for n in line["choices"][0]["accept_lengths"]]
    assert found["overall"].accepted == pytest.approx(sum(steps) / len(steps))
    with pytest.raises(ValueError, match="different questions"):
        spec_bench.scores(ours[:1], plain, len)


def test_questions_are_taken_from_the_tasks_in_turn(tmp_path):
    file = tmp_path / "question.jsonl"
    kinds = ["writing", "math", "qa", "qa"]
    lines = [
        {"question_id": i, "category": c, "turns": ["a", "b"]}
        for i, c in enumerate(kinds)
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert [q.id for q in spec_bench.read(file, 3)] == [0, 2, 1]
    file.write_text('{"question_id": 1}')
    with pytest.raises(ValueError, match="line 1"):
        spec_bench.read(file)
    with pytest.raises(FileNotFoundError, match="question"):
        spec_bench.read(tmp_path / "none")


# Stores from files


def test_stores_are_built_from_files(tmp_path, monkeypatch):
    model = types.SimpleNamespace(tokenizer=lambda text: {"input_ids": [len(text)] * 3})
    monkeypatch.setattr(cli_store, "load", lambda *a, **k: model)
    (tmp_path / "a.txt").write_text("four")
    (tmp_path / "b.jsonl").write_text('{"text": "ab"}\n{"text": "abc"}\n')
    args = argparse.Namespace(
        texts=[str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")],
        target="x",
        out=str(tmp_path / "store"),
        tokens=6,
    )
    cli_store._store(args)
    assert drafters.store.load(args.out).tokens.tolist() == [2, 2, 2, -1, 3, 3, 3, -1]
    args.tokens = 2
    with pytest.raises(ValueError, match="has 3 tokens"):
        cli_store._store(args)
    (tmp_path / "b.jsonl").write_text("[]")
    with pytest.raises(ValueError, match=r"b\.jsonl, line 1"):
        cli_store._store(args)
