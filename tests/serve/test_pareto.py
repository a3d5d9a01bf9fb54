"""Predicted Pareto fronts: what a schedule by batch size must look like."""

import importlib.util
import json
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "experiments" / "pareto.py"


@pytest.fixture(scope="module")
def pareto():
    spec = importlib.util.spec_from_file_location("pareto", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_best_setting_is_never_behind(pareto, tmp_path, monkeypatch):
    monkeypatch.setattr(pareto, "enable_cache", lambda: None)
    lines, figure = tmp_path / "lines.jsonl", tmp_path / "front.png"
    words = ["--chip", "v5e", "--target", "llama-3.1-8b", "--drafters", "eagle3"]
    words += ["--batches", "1", "512", "--context", "512", "--acceptance", "0.7"]
    assert pareto.main([*words, "--json", str(lines), "--plot", str(figure)]) == 0
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    rate = {(p["batch"], p["method"]): p["tokens_per_s"] for p in found}
    for batch in (1, 512):
        fixed = rate[batch, "eagle3, 4 drafts"]
        assert rate[batch, "eagle3, best"] >= max(fixed, rate[batch, "plain"])
    # Memory is the limit of a small batch and arithmetic that of a large one.
    assert rate[1, "eagle3, 4 drafts"] > 2 * rate[1, "plain"]
    assert rate[512, "eagle3, 4 drafts"] < rate[512, "plain"]
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_a_chip_needs_an_acceptance(pareto, monkeypatch, capsys):
    monkeypatch.setattr(pareto, "enable_cache", lambda: None)
    assert pareto.main(["--chip", "v5e", "--target", "llama-3.1-8b"]) == 2
    assert "needs --acceptance" in capsys.readouterr().err
