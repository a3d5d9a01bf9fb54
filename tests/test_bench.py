"""Benchmarks on tiny models: records, losslessness, prompts, interruption."""

import json

import jax.numpy as jnp
import pytest

import jspec
from jspec import (
    arguments,
    bench,
    drafters,
    judging,
    measure,
    record,
    report,
    trial,
    verify,
)
from jspec.prompts import DEFAULT, Question, load_prompts
from jspec.testing import tiny
from jspec.types import DraftShape

MODEL = tiny.model(seed=3, layers=1)
FIELDS = [
    "method",
    "target",
    "drafter",
    "rule",
    "topology",
    "temperature",
    "batch",
    "prompts",
    "new_tokens",
    "rounds",
    "tau",
    "acceptance_by_depth",
    "tokens_per_s",
    "ar_tokens_per_s",
    "speedup",
    "predicted_speedup",
    "t_ar_ms",
    "t_draft_ms",
    "t_verify_ms",
    "t_round_ms",
    "overhead",
    "lossless",
    "first_divergence",
    "max_logit_gap",
    "device",
    "dtype",
    "jax",
    "seed",
    "commit",
]
LOOP = [5, 6, 7, 8, 9]
QUESTIONS = [
    Question(0, "code", LOOP * 4),
    Question(1, "chat", [1, 2, 3]),
    Question(2, "code", LOOP * 3),
]
NGRAM = jspec.Draft(drafters.ngram(gamma=3, shortest=2), name="ngram")


def gullible(noise, block, target):
    """Accepts whatever is drafted: changes the text."""
    del noise
    node = judging.deepest(block, judging.eligible(block))
    return judging.verdict(block, node, target.best[node])


WALK = bench.Method("ngram", NGRAM, verify.walk)
GULLIBLE = bench.Method("gullible", NGRAM, gullible)


def settings(**changes):
    return record.Settings(**{"max_new_tokens": 8, "smoke": True, **changes})


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_method_gets_one_line_with_the_fields_of_the_contract(tmp_path, capsys):
    path = tmp_path / "out.jsonl"
    methods = [bench.Method("plain", None), WALK, GULLIBLE]
    records = bench.run(MODEL, methods, QUESTIONS, settings(json=str(path)))
    plain, ngram, lossy = lines(path)
    assert [plain, ngram, lossy] == records
    assert all(list(line) == FIELDS for line in records)
    assert (plain["tau"], plain["speedup"], plain["topology"]) == (1.0, 1.0, "none")
    assert plain["new_tokens"] == 3 * 8 and plain["prompts"] == 3
    assert ngram["lossless"] and ngram["first_divergence"] is None
    assert ngram["max_logit_gap"] is None
    assert (ngram["rule"], ngram["topology"]) == ("walk", "chain of 3")
    assert ngram["tau"] == pytest.approx(1 + sum(ngram["acceptance_by_depth"]))
    assert ngram["tau"] == ngram["new_tokens"] / ngram["rounds"]
    assert ngram["overhead"] == pytest.approx(
        ngram["t_round_ms"] / (ngram["t_draft_ms"] + ngram["t_verify_ms"])
    )
    assert not lossy["lossless"] and lossy["first_divergence"] is not None
    assert lossy["max_logit_gap"] > trial.TIE
    said = capsys.readouterr()
    assert "bonus included" in said.out
    assert "gullible does not keep the target's text" in said.err
    assert report.kept(ngram) == "yes"
    assert report.kept(lossy) == f"NO, {lossy['max_logit_gap']:.2g}"


def test_above_temperature_0_the_rule_decides_what_is_lossless():
    warm = settings(temperature=0.8)
    exact, lossy = bench.run(MODEL, [WALK, GULLIBLE], QUESTIONS, warm)
    assert exact["lossless"] and exact["rule"] == "walk"
    assert not lossy["lossless"] and lossy["first_divergence"] is None


def test_an_interruption_keeps_the_lines_of_finished_methods(tmp_path, capsys):
    path = tmp_path / "out.jsonl"

    def interrupt(*arguments):
        raise KeyboardInterrupt

    broken = drafters.ngram(gamma=3)._replace(propose=interrupt)
    methods = [bench.Method("plain", None), bench.Method("hm", jspec.Draft(broken))]
    with pytest.raises(KeyboardInterrupt):
        bench.run(MODEL, methods, QUESTIONS, settings(json=str(path)))
    assert [line["method"] for line in lines(path)] == ["plain"]
    assert "1 methods are finished" in capsys.readouterr().err


def test_prompts_beyond_the_context_are_skipped_and_said_so(capsys):
    long = Question("long", "chat", [1] * 600)
    (line,) = bench.run(
        MODEL, [bench.Method("p", None)], [long, *QUESTIONS], settings()
    )
    assert line["prompts"] == 3
    assert "skipped question long" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no prompt fits"):
        bench.run(MODEL, [], [long], settings())


def test_a_drafter_that_finds_nothing_is_pointed_out(capsys):
    question = Question(0, "chat", [1, 2, 3])
    few = settings(max_new_tokens=2)
    (line,) = bench.run(MODEL, [WALK], [question], few)
    assert line["tau"] == 1 and line["lossless"]
    assert "never drafted anything" in capsys.readouterr().err


def test_a_tie_is_lossless_and_a_wider_gap_is_not():
    assert trial.Divergence().is_tie
    assert trial.Divergence(3, 1e-5).is_tie
    assert not trial.Divergence(3, 1e-3).is_tie
    assert not trial.Divergence(3, float("inf")).is_tie


def test_batches_hold_one_category_and_take_turns():
    prompts = [(q.category, q.prompt) for q in QUESTIONS]
    made = trial.batches(prompts, 1)
    assert [b.category for b in made] == ["code", "chat", "code"]
    made = trial.batches(prompts, 3)
    assert [(len(b.prompts), b.repeats) for b in made] == [(3, 1), (3, 2)]
    with pytest.raises(ValueError, match="batch is 0"):
        trial.batches(prompts, 0)


def test_terms_are_of_rounds_of_every_width():
    few = {"rule": verify.walk, "slots": 64, "runs": 3}
    terms = measure.terms(MODEL, NGRAM, [[1, 2, 3]], **few)
    assert min(terms.ar, terms.draft, terms.verify, terms.round) > 0
    narrow, full = terms.widths
    assert (narrow.nodes, full.nodes) == (1, NGRAM.drafter.shape.nodes)
    assert (full.verify, full.round) == (terms.verify, terms.round)


def test_terms_of_rounds_are_means_over_widths():
    narrow, full = measure.Width(1, 2.0, 3.0), measure.Width(4, 4.0, 6.0)
    terms = measure.Terms(2.0, 1.0, full.verify, full.round, (narrow, full))
    half = terms.at((0.5, 0.5))
    assert half.verify == pytest.approx((narrow.verify + full.verify) / 2)
    assert half.overhead == half.round / (half.draft + half.verify)
    assert terms.speedup(2.0) == pytest.approx(2 * terms.speedup(1.0))


def test_rounds_have_the_width_that_their_drafts_need():
    chain = DraftShape(nodes=8, depth=7, widths=(1, 4))
    lengths = (4, 1, 0, 1, 2, 0, 0, 0)
    assert measure.width_shares(chain, lengths) == pytest.approx((0.5, 0.25, 0.25))
    both = measure.width_shares(chain, lengths, batch=2)
    assert both == pytest.approx((0.25, 0.75**2 - 0.25, 1 - 0.75**2))
    tree = DraftShape(nodes=8, depth=3, widths=(1, 4))
    assert measure.width_shares(tree, (4, 1, 0, 3)) == pytest.approx((0.5, 0, 0.5))


def test_the_verify_curve_has_every_width():
    curve = measure.verify_curve(MODEL, [1, 3], context=16, repetitions=2, runs=1)
    assert list(curve) == [1, 3] and min(curve.values()) > 0
    assert measure.copy_bandwidth(megabytes=4, runs=1) > 0


def test_a_few_layers_of_a_model_are_a_model():
    whole = tiny.model(seed=3, layers=3)
    short = drafters.first_layers(whole, 1)
    assert short.config == MODEL.config
    assert short.params.layers == whole.params.layers[:1]
    assert short.params.embed is whole.params.embed
    with pytest.raises(ValueError, match="at most 2"):
        drafters.first_layers(whole, 3)


# Prompts


def write(path, *rows):
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
    return path


def row(number, category="a", turns=("text",)):
    return {"question_id": number, "category": category, "turns": list(turns)}


def test_a_limit_takes_from_all_categories(tmp_path):
    path = write(tmp_path / "p", row(1), row(2), "", row(3, "b"), row(4, "c"), row(5))
    assert [q.id for q in load_prompts(path)] == [1, 3, 4, 2, 5]
    assert {q.category for q in load_prompts(path, 3)} == {"a", "b", "c"}
    assert load_prompts(path, 1)[0].prompt == "text"


def test_the_packaged_prompts_are_there():
    assert DEFAULT.is_file()
    assert len({q.category for q in load_prompts(limit=6)}) > 1


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row(1), "{oops"], "line 2: not a JSON object"),
        (["[1, 2]"], "line 1: not a JSON object"),
        ([{"question_id": 1, "turns": ["x"]}], "'category' is missing"),
        ([row(1, turns=())], "'turns' must be"),
        ([row(1, turns=(" ",))], "'turns' must be"),
        ([], "holds no prompts"),
    ],
)
def test_bad_prompt_files_are_named_with_their_line(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        load_prompts(write(tmp_path / "p", *rows))


def test_a_missing_file_and_a_bad_limit_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="no prompt file"):
        load_prompts(tmp_path / "absent.jsonl")
    with pytest.raises(ValueError, match="limit is 0"):
        load_prompts(limit=0)


def test_the_record_says_where_it_was_made():
    assert record.device()
    commit = record.commit()
    assert commit is None or len(commit.removesuffix("-dirty")) == 40
    assert jnp.dtype(MODEL.dtype).name == "float32"


def test_auto_is_the_precision_that_scores_blocks_fastest(tmp_path, monkeypatch):
    flags = tmp_path / "cpuinfo"
    monkeypatch.setattr(arguments, "_CPU", flags)
    parser = bench.argument_parser(None, {"dtype": "auto"})
    assert parser.parse_args([]).dtype == "float32"  # says nothing of its units
    flags.write_text("flags\t\t: fpu avx512_bf16 amx_bf16 amx_tile\n")
    assert parser.parse_args([]).dtype == "bfloat16"
    assert parser.parse_args(["--dtype", "float32"]).dtype == "float32"
    assert bench.argument_parser(None).parse_args([]).dtype is None
    with pytest.raises(SystemExit):
        parser.parse_args(["--dtype", "int8"])
