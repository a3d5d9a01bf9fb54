"""Predictions from sizes: against independent counts, and as the command prints them."""

import json

import jax
import pytest

from jspec import phases, predict, roofline, topology
from jspec.cli import main
from jspec.closed_form import Cost, arithmetic
from jspec.models.presets import PRESETS, preset
from jspec.phases import Setting

LLAMA = preset("llama-3.1-8b")
PUBLISHED = {  # billions of parameters, as the model cards say
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.55,
    "qwen3-8b": 8.19,
    "qwen3-32b": 32.76,
    "deepseek-v3": 671.03,
}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_have_the_published_size(name):
    config = preset(name)
    weights = phases.target_weights(phases.select(config, tuple(range(config.layers))))
    count = sum(x.size for x in jax.tree.leaves(weights)) / 1e9
    assert count == pytest.approx(PUBLISHED[name], rel=2e-3)


def test_a_step_costs_what_the_roofline_module_counts():
    """Two independent closed forms; they differ in the looked-up embedding rows."""
    model = roofline.ModelCost.from_config(LLAMA)
    for nodes, batch in ((1, 1), (8, 1), (33, 8)):
        setting = None if nodes == 1 else Setting(nodes, nodes - 1)
        costs = arithmetic(LLAMA, "ngram", setting, batch, 2048, 1)
        got = costs["score"]
        flops, moved = roofline.step_cost(model, rows=nodes, length=2048, batch=batch)
        assert got.flops == pytest.approx(flops, rel=1e-3)
        # The block's own keys and values are counted where they are appended.
        own = costs["append"].moved / 2
        assert got.moved + own == pytest.approx(moved, rel=2e-3)


def test_flops_are_those_of_the_lowered_program():
    """XLA counts the same products in the real score of two layers."""
    config = phases.select(LLAMA, (0, 1))
    batch, nodes, slots = 2, 8, 512
    phase = phases.of_target(config, batch, nodes, slots)["score"]
    found = jax.jit(phase.call).lower(*phase.arguments).cost_analysis()["flops"]
    ours = arithmetic(config, "ngram", Setting(8, 7), batch, slots, 1)["score"]
    assert found == pytest.approx(ours.flops, rel=0.03)


def test_only_chosen_experts_are_read():
    config = preset("deepseek-v3")
    layer = phases.select(config, (10,))
    costs = [
        arithmetic(layer, "ngram", s, 1, 1024, 1)["score"].moved
        for s in (None, Setting(9, 8))
    ]
    expert = 3 * 7168 * 2048 * 2
    head = 2 * 7168 * 129280
    # One row reads 8 experts and the shared one, beside attention and head.
    assert 9 * expert < costs[0] - head < 9 * expert + 600e6
    share = 256 * (1 - (1 - 8 / 256) ** 9) - 8
    assert costs[1] - costs[0] == pytest.approx(share * expert, rel=0.02)


def test_tau_of_chains_and_trees():
    chain, half = Setting(4, 3), [0.5]
    assert predict.expected_tau(chain, half) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert predict.expected_tau(chain, [0.9, 0.5]) == pytest.approx(
        1 + 0.9 * (1.5 + 0.25)
    )
    # Two children of the root: 1/2, and 1/4 of what it missed.
    assert predict.expected_tau(Setting(3, 1), half) == pytest.approx(1 + 0.5 + 0.25)
    taus = [predict.expected_tau(Setting(n, 5), [0.7]) for n in (6, 12, 24, 48)]
    assert taus == sorted(taus)


def test_speed_up_follows_from_the_terms():
    table = predict.predict(
        LLAMA,
        "eagle3",
        "h100",
        [Setting(g + 1, g) for g in (1, 3, 8)],
        acceptance=[0.8],
    )
    assert not table.compiled
    for row in table.rows:
        latency = (row.draft + row.verify) / row.tau
        assert table.speedup(row) == pytest.approx(table.plain.verify / latency)
        assert table.speedup(row) > 1 if row.tau > table.break_even(row) else True
    best = max(table.rows, key=table.speedup)
    assert table.best is best
    # A memory-bound step: the block costs little more than a row.
    assert 1 <= table.ratio(table.rows[1]) < 1.1


def test_nothing_pays_with_a_bad_drafter():
    settings = [Setting(3, 2)]
    table = predict.predict(LLAMA, "eagle3", "h100", settings, acceptance=[0.0])
    assert table.best is None


def test_devices_share_the_work():
    one, two = (arithmetic(LLAMA, "eagle3", Setting(5, 4), 1, 1024, n) for n in (1, 2))
    for name in one:
        assert two[name].moved == pytest.approx(one[name].moved / 2)
        assert two[name].memory == pytest.approx(one[name].memory / 2)


def test_a_slice_is_a_chip_and_devices_and_may_be_too_small(capsys):
    assert topology.slice_of("v5e-8") == ("v5e", 8)
    assert topology.slice_of("v5p-16") == ("v5p", 8)  # two TensorCores a device
    for name in ("v5e", "v5p-3", "h100-8", "v5e-many"):
        with pytest.raises(ValueError, match=f"mesh '{name}' is not a slice"):
            topology.slice_of(name)
    words = ["predict", "--chains", "4", "--trees", "none", "--arithmetic"]
    for mesh, verdict in (("v5p-16", "it fits"), ("v5e-8", "it does NOT fit")):
        assert main([*words, "--target", "llama-3.1-70b", "--mesh", mesh]) == 0
        assert verdict in " ".join(capsys.readouterr().out.split())


def test_costs_add_and_unknown_seconds_stay_unknown():
    total = Cost(1, 2, 3, 4) + Cost(1, 1, 1, 1) * 2
    assert total == Cost(3, 4, 5, 6)
    assert (total + Cost(seconds=None)).seconds is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(chip="z80"), "chip 'z80' is not one of"),
        (dict(drafter="oracle"), "drafter 'oracle' is not one of"),
        (dict(batch=0), "batch must be an integer >= 1"),
        (dict(acceptance=[]), "acceptance is empty"),
        (dict(acceptance=[1.5]), "acceptance must be finite"),
        (dict(compile=True), "compiled figures are for TPUs"),
    ],
)
def test_bad_input_is_named(change, message):
    arguments = dict(drafter="eagle3", chip="h100", settings=[Setting(2, 1)]) | change
    with pytest.raises(ValueError, match=message):
        predict.predict(LLAMA, **arguments)


def test_an_eagle_head_for_latent_attention_is_refused():
    with pytest.raises(ValueError, match="--drafter mtp"):
        phases.drafting("eagle3", preset("deepseek-v3"), Setting(2, 1))


def test_an_unknown_target_is_named():
    with pytest.raises(ValueError, match=r"'gpt-2' is not one of deepseek-v3"):
        preset("gpt-2")


@pytest.mark.parametrize("name", ["dflash", "dspark", "ngram"])
def test_a_tree_for_a_drafter_of_chains_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} drafts chains, not a tree 8/3"):
        phases.drafting(name, LLAMA, Setting(8, 3))


def test_a_block_is_drafted_in_one_forward():
    """Its weights are read once however long it is, those of EAGLE-3 once a draft."""

    def grows(name):
        short, long = (
            predict.arithmetic(LLAMA, name, Setting(g + 1, g), 1, 512, 1)["propose"]
            for g in (2, 8)
        )
        return long.moved / short.moved

    assert grows("dflash") < 1.01
    assert grows("dspark") < 1.15  # and its second head once a draft
    assert grows("eagle3") > 3


@pytest.mark.parametrize("name", phases.DRAFTERS)
def test_the_phases_of_a_round_are_consistent(name):
    """What one phase returns is what the next one takes, on a small real model."""
    config = phases.select(LLAMA, (0,))
    setting = Setting(4, 3)
    drafted = phases.drafting(name, config, setting)
    state = phases.state_of(config, drafted, 2, 256)
    own = phases.of_drafter(config, drafted, state)
    target = phases.of_target(config, 2, setting.nodes, 256)
    block, _ = jax.eval_shape(own["propose"].call, *own["propose"].arguments)
    scored = jax.eval_shape(target["score"].call, *target["score"].arguments)
    assert block.token.shape == (2, 4)
    assert scored.logits.shape == own["accept"].arguments[1].shape
    verdict = jax.eval_shape(own["accept"].call, *own["accept"].arguments)
    assert verdict.path.shape == target["append"].arguments[2].shape
    after = jax.eval_shape(own["update"].call, *own["update"].arguments)
    for old, new in zip(
        jax.tree.leaves(state.draft), jax.tree.leaves(after), strict=True
    ):
        assert new.shape == old.shape


def test_the_command_prints_the_table(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(topology, "installed", lambda: False)
    lines, picture = tmp_path / "out.jsonl", tmp_path / "plot.png"
    argv = "predict --target llama-3.1-8b --drafter eagle3 --chains 2,4 --trees 16/4"
    argv += f" --acceptance 0.8,0.7 --chip h100,v5e --json {lines} --plot {picture}"
    assert main(argv.split()) == 0
    shown = capsys.readouterr().out
    assert "H100 SXM x 1" in shown and "TPU v5e x 1" in shown
    assert "tree 16/4" in shown and "best setting:" in shown
    assert "All figures are arithmetic" in " ".join(shown.split())
    assert "there is no libtpu here" in " ".join(shown.split())
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len(records) == 6
    assert all(not r["compiled"] and r["speedup"] > 1 for r in records)
    assert picture.stat().st_size > 10_000


def test_the_command_refuses_a_plot_without_a_profile(capsys):
    assert main(["predict", "--plot", "x.png"]) == 2
    assert "--acceptance" in capsys.readouterr().err


def test_larger_batches_gain_less():
    gains = []
    for batch in (1, 8, 64):
        table = predict.predict(
            LLAMA,
            "eagle3",
            "v5e",
            [Setting(9, 8)],
            batch=batch,
            acceptance=[0.75],
            compile=False,
        )
        gains.append(table.speedup(table.rows[0]))
    assert gains[2] < min(gains[:2])
