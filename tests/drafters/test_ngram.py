"""What prompt lookup proposes, against slow and obvious references."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jspec
from jspec.drafters import first, first_whole, latest, ngram

WIDTH = 24


def reference(text, gamma, longest, shortest, pick):
    """Drafted tokens by plain Python search."""
    n_text = len(text)
    for n in range(min(longest, n_text - 1), shortest - 1, -1):
        tail = text[-n:]
        ends = [
            i + n - 1 for i in range(n_text - n) if text[i : i + n] == tail
        ]  # the occurrence at the very end is excluded by the range
        if pick == "first_whole":
            ends = [e for e in ends if e + gamma < n_text]
        if ends:
            end = ends[-1] if pick == "latest" else ends[0]
            return text[end + 1 : end + 1 + gamma]
    return []


PICKS = {"latest": latest, "first": first, "first_whole": first_whole}


def propose(text, drafter):
    tokens = np.zeros((1, WIDTH), np.int32)
    tokens[0, : len(text)] = text
    tokens[0, len(text) :] = text[-1]  # undefined entries must not matter
    context = jspec.Context(jnp.asarray(tokens), jnp.array([len(text)]), None)
    block, _ = PROPOSE[drafter](context)
    return [
        int(t)
        for t, live in zip(block.token[0, 1:], block.live[0, 1:], strict=True)
        if live
    ]


class _Jitted(dict):
    def __missing__(self, drafter):
        self[drafter] = jax.jit(lambda c: drafter.propose(None, (), None, c))
        return self[drafter]


PROPOSE = _Jitted()


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=WIDTH),
    st.sampled_from(sorted(PICKS)),
    st.sampled_from([(4, 3, 1), (3, 2, 1), (2, 3, 2)]),
)
def test_drafts_equal_the_reference(text, pick, sizes):
    gamma, longest, shortest = sizes
    drafter = ngram(gamma, longest, shortest, PICKS[pick])
    assert propose(text, drafter) == reference(text, gamma, longest, shortest, pick)


def test_no_match_drafts_nothing():
    assert propose([1, 2, 3, 4], ngram(4, shortest=1)) == []
    assert propose([1], ngram(4, shortest=1)) == []


def test_the_latest_and_the_first_match_differ():
    text = [1, 2, 9, 1, 2, 8, 1, 2]
    assert propose(text, ngram(2, shortest=1, pick=latest)) == [8, 1]
    assert propose(text, ngram(2, shortest=1, pick=first)) == [9, 1]


def test_a_longer_match_beats_a_later_one():
    text = [5, 6, 7, 1, 6, 7, 2, 5, 6, 7]
    assert propose(text, ngram(1, 3, 1)) == [1]
    assert propose(text, ngram(1, 2, 1)) == [2]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"gamma": 0}, "gamma is 0"),
        ({"gamma": -3}, "gamma is -3"),
        ({"longest": 1, "shortest": 2}, "2 .. 1"),
        ({"shortest": 0}, "0 .. 5"),
    ],
)
def test_bad_sizes_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        ngram(**kwargs)


def test_same_arguments_give_the_same_object():
    assert ngram(gamma=4) is ngram(gamma=4)
