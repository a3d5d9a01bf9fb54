"""The command line of serving on a tiny model in a folder."""

import jax
import pytest

import jspec
from jspec import cli
from jspec.serve import costs
from jspec.testing import tiny
from jspec.testing.tiny import byte_tokenizer

OPTIONS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = tiny.model(layers=1, tokenizer=byte_tokenizer(), vocab_size=257)
    return jspec.save(model, tmp_path_factory.mktemp("m"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Programs are cached in a folder of the test; the setting does not outlive it."""
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    before = {n: getattr(jax.config, n) for n in OPTIONS}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_bench_writes_a_cost_table(folder, tmp_path, capsys):
    file = tmp_path / "costs.json"
    words = ["bench", "--target", str(folder), "--cost-table", str(file), "--smoke"]
    assert cli.main([*words, "--batch", "2", "--gamma", "3"]) == 0
    assert costs.load(file).rows.tolist() == [2, 8]
    assert "8 rows" in capsys.readouterr().out


def test_a_table_of_one_point_is_refused(folder, tmp_path, capsys):
    words = ["bench", "--target", str(folder), "--cost-table", str(tmp_path / "c")]
    assert cli.main([*words, "--gamma", "0"]) == 2
    assert "gamma is 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sizes", "one"], "give numbers like 1,4,8"),
        (["--sizes", "4,1"], "ascending"),
        (["--context", "9999"], "the model's context ends at 512"),
        (["--queue", "0"], "queue must be an integer >= 1"),
        (["--gamma", "0"], "gamma is 0"),
    ],
)
def test_a_server_that_cannot_start_says_why(folder, options, message, capsys):
    assert cli.main(["serve", "--target", str(folder), *options]) == 2
    assert message in capsys.readouterr().err


def test_a_command_line_serves(folder, monkeypatch):
    """All options reach the application that uvicorn is given."""
    import uvicorn
    from starlette.testclient import TestClient

    def run(app, host, port, log_level):
        assert (host, port) == ("127.0.0.1", 8123)
        with TestClient(app) as client:
            answer = client.post("/v1/completions", json={"prompt": "a"})
            assert answer.status_code == 401
            answer = client.post(
                "/v1/completions",
                json={"prompt": "abab", "max_tokens": 5},
                headers={"Authorization": "Bearer k"},
            )
            assert answer.json()["usage"]["completion_tokens"] == 5

    monkeypatch.setattr(uvicorn, "run", run)
    words = ["serve", "--target", str(folder), "--sizes", "1", "--context", "64"]
    assert cli.main([*words, "--port", "8123", "--api-key", "k", "--gamma", "2"]) == 0
