"""Sampling options: layout, seeds and the messages of every mistake."""

import numpy as np
import pytest

from jspec import sampling as smp

INF = np.inf


def make(batch=1, vocab=12, eos_ids=(2,), **kwargs):
    return smp.options(batch, vocab_size=vocab, eos_ids=eos_ids, **kwargs)


def test_options_lay_out_rows_and_pad_lists():
    o = make(
        2,
        top_k=np.asarray([3, 10**12]),
        temperature=(0.5, None),
        logit_bias=[{3: 1.5}, None],
        forbidden_tokens=range(9),
        forced_tokens={0: 10},
    )
    np.testing.assert_array_equal(o.top_k, [3, 12])
    np.testing.assert_array_equal(o.temperature, [0.5, 0.0])
    assert o.bias_id.shape == o.bias_value.shape == o.forced_at.shape == (2, 8)
    assert o.forbidden.shape == (2, 16)
    np.testing.assert_array_equal(o.bias_id[:, :2], [[3, -1], [-1, -1]])
    np.testing.assert_array_equal(o.eos, [2] + [-1] * 7)


MISTAKES = [
    ({"temprature": 1.0}, r"'temprature'; did you mean 'temperature'\? known.*top_k"),
    ({"zzz": 1}, r"unknown sampling option 'zzz'; known options"),
    ({"temperature": -1.0}, r"temperature = -1.0 must be a number in \[0, inf\)"),
    ({"temperature": float("nan")}, r"temperature = nan must be a number in"),
    ({"temperature": [1.0, INF]}, r"temperature = inf in row 1 must be a number in"),
    ({"temperature": "hot"}, r"temperature = 'hot' must be a number"),
    ({"top_p": 0.0}, r"top_p = 0.0 must be a number in \(0, 1\]; 1 turns it off"),
    ({"top_p": [0.5, 1.5]}, r"top_p = 1.5 in row 1 must be a number in"),
    ({"top_k": -1}, r"top_k = -1 must be an integer in \[0, inf\); 0 turns it off"),
    ({"top_k": 2.5}, r"top_k = 2.5 must be an integer"),
    ({"top_k": True}, r"top_k = True must be an integer"),
    ({"min_p": 1.5}, r"min_p = 1.5 must be a number in \[0, 1\]"),
    (
        {"repetition_penalty": 0},
        r"repetition_penalty = 0 must be a number in \(0, inf\)",
    ),
    ({"presence_penalty": INF}, r"presence_penalty = inf must be a number in"),
    ({"frequency_penalty": 10**400}, r"frequency_penalty = 1000.* must be a number"),
    ({"min_new_tokens": -3}, r"min_new_tokens = -3 must be an integer in"),
    ({"seed": -1}, r"seed = -1 must be an integer in \[0, 2\*\*64\)"),
    ({"seed": [1, 2, 3]}, r"seed is a list of 3 but the batch has 2 sequences"),
    ({"top_k": []}, r"top_k is a list of 0 but the batch has 2"),
    ({"logit_bias": [{}]}, r"logit_bias is a list of 1 but the batch has 2"),
    ({"logit_bias": {12: 1.0}}, r"logit_bias has id 12 in row 0.*\[0, 12\)"),
    ({"logit_bias": {1: np.nan}}, r"logit_bias has value nan in row 0; .*-inf"),
    ({"logit_bias": {1: INF}}, r"logit_bias has value inf in row 0"),
    ({"logit_bias": [1, 2]}, r"logit_bias = \[1, 2\] in row 0 must be a dict"),
    ({"forbidden_tokens": [[0], [-1]]}, r"forbidden_tokens has id -1 in row 1"),
    ({"forbidden_tokens": 3}, r"forbidden_tokens = 3 in row 0 must be a list of ids"),
    ({"forbidden_tokens": "ab"}, r"forbidden_tokens = 'ab' in row 0 must be a list"),
    ({"forbidden_tokens": [{1: 2}, None]}, r"= \{1: 2\} in row 0 must be a list"),
    ({"forced_tokens": {-1: 3}}, r"forced_tokens has position -1 in row 0"),
    ({"forced_tokens": {0: 99}}, r"forced_tokens has id 99 in row 0"),
    (
        {"forced_tokens": [{}, {0: 3}], "forbidden_tokens": [3]},
        r"row 1 both forces and forbids token 3; remove it",
    ),
    (
        {"forced_tokens": {0: 3}, "logit_bias": {3: -INF}},
        r"row 0 both forces and forbids token 3",
    ),
    ({"forbidden_tokens": list(range(12))}, r"row 0 forbids all 12 tokens; leave one"),
    (
        {"forbidden_tokens": [i for i in range(12) if i != 2], "min_new_tokens": 1},
        r"row 0 forbids all 12 tokens",
    ),
    ({"eos_ids": (12,)}, r"eos_ids has id 12; ids are integers in \[0, 12\)"),
    ({"batch": 0}, r"batch = 0; it must be at least 1"),
]


@pytest.mark.parametrize("kwargs, message", MISTAKES, ids=lambda x: str(x)[:40])
def test_mistakes_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        make(**{"batch": 2, **kwargs})
