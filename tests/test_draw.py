"""Drawn rounds: what was kept is what was generated."""

import jax
import numpy as np
import pytest
from rich.console import Console

import jspec
from jspec import draw
from jspec.drafters import growth
from jspec.drafters.draft import Draft
from jspec.drafters.eagle import drafter
from jspec.testing import tiny
from jspec.train.starts import fresh_eagle3

MODEL = tiny.model(seed=3)
PROMPT = [5, 9, 2, 7]


def chain():
    """The target drafts for itself: all is kept."""
    return jspec.load_drafter(MODEL, MODEL, gamma=3)


def small_tree():
    head = fresh_eagle3(MODEL, (0, 1, 2), np.arange(61), jax.random.key(0))
    grower = growth.dynamic(nodes=8, depth=3, width=3)
    return Draft(drafter(head.design, grower), head.weights)


@pytest.mark.parametrize(("made", "kept_all"), [(chain, True), (small_tree, False)])
def test_kept_nodes_and_bonuses_are_the_text(made, kept_all):
    rounds, text = draw.rounds(MODEL, made(), PROMPT, count=4), []
    for one in rounds:
        kept = sorted(one.accepted)  # by falling probability: parents come first
        assert [one.parent[n] for n in kept] == [0, *kept][: len(kept)]
        text += [int(one.token[n]) for n in kept] + [one.next_token]
    plain = jspec.generate(MODEL, None, [PROMPT], max_new_tokens=len(text))
    assert text == plain.tokens[0]
    assert all(len(one.accepted) == 3 for one in rounds) == kept_all


def test_all_proposed_nodes_are_shown(tmp_path):
    rounds = draw.rounds(MODEL, small_tree(), PROMPT, count=1)
    console = Console(width=60, record=True)
    console.print(draw.terminal(rounds[0], str))
    said = console.export_text()
    assert len(said.splitlines()) == rounds[0].live.sum() + 1
    assert f"{len(rounds[0].accepted)} of 7 drafts kept" in said
    assert said.count("+") == len(rounds[0].accepted)
    draw.image(rounds, str, tmp_path / "tree.png")
    assert (tmp_path / "tree.png").read_bytes().startswith(b"\x89PNG")
