"""The command line on a tiny model in a folder."""

import json

import jax
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import jspec
from jspec import cli
from jspec.testing import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with a tokenizer of 61 words."""
    words = {f"w{i}": i for i in range(60)} | {"?": 60}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")
    return jspec.save(
        tiny.model(seed=3, layers=1, tokenizer=fast), tmp_path_factory.mktemp("m")
    )


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Programs are cached in a folder of the test; the setting does not outlive it."""
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    before = {n: getattr(jax.config, n) for n in OPTIONS}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


OPTIONS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


def generate(folder, *options):
    words = ["generate", "w1 w2 w3 w1 w2 w3", "--target", str(folder)]
    return cli.main([*words, "--max-new-tokens", "12", *options])


@pytest.mark.parametrize("command", [[], ["generate"], ["bench"]])
def test_help_is_printed(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([*command, "--help"])
    assert stop.value.code == 0
    assert "usage: jspec" in capsys.readouterr().out


@pytest.mark.parametrize(
    "draft", [["none"], ["ngram", "--gamma", "3"], ["ngram", "--rule", "walk"]]
)
def test_generate_prints_the_text_and_then_what_it_took(folder, draft, capsys):
    assert generate(folder, "--draft", *draft) == 0
    said = capsys.readouterr()
    model = jspec.load(folder)
    out = jspec.generate(model, None, "w1 w2 w3 w1 w2 w3", max_new_tokens=12)
    assert said.out == out.text[0] + "\n"
    assert "tau" in said.err and "finished by length" in said.err


def test_a_model_can_draft_for_another(folder, capsys):
    assert generate(folder, "--draft", str(folder), "--gamma", "1") == 0
    assert "tau 2.00" in capsys.readouterr().err  # it agrees with itself


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--gamma", "0"], "gamma is 0"),
        (["--draft", "none", "--stop", ""], "stop string is empty"),
        (["--draft", "nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_one_line_and_status_2(folder, options, message, capsys):
    assert generate(folder, *options) == 2
    said = capsys.readouterr()
    errors = [line for line in said.err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and message in errors[0]
    assert "Traceback" not in said.err


def test_interruption_is_status_130(folder, monkeypatch, capsys):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "load", interrupt)
    assert generate(folder) == 130
    assert "interrupted" in capsys.readouterr().err


def test_bench_runs_several_methods(folder, tmp_path, capsys):
    prompts, path = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    question = {"question_id": 1, "category": "a", "turns": ["w1 w2 w1 w2 w1 w2"]}
    prompts.write_text(json.dumps(question))
    words = ["bench", "--target", str(folder), "--methods", "none,none", "--smoke"]
    assert cli.main([*words, "--prompts", str(prompts), "--json", str(path)]) == 0
    names = [json.loads(line)["method"] for line in path.read_text().splitlines()]
    assert names == ["none", "none"]
    assert "finished methods" in capsys.readouterr().out


def test_bench_names_a_missing_prompt_file(capsys):
    assert cli.main(["bench", "--prompts", "/nowhere.jsonl"]) == 2
    assert "no prompt file /nowhere.jsonl" in capsys.readouterr().err
