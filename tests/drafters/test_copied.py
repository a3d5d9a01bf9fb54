"""What drafters that copy propose, against slow and obvious references."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jspec
from jspec import drafters, tree
from jspec.drafters import store
from jspec.drafters.occurrences import occurrences
from jspec.drafters.suffix import Rates, path

WIDTH, GAMMA, LONGEST, MANY = 32, 4, 6, 64
texts = st.lists(st.integers(0, 2), min_size=1, max_size=WIDTH)


@functools.cache
def jitted(drafter):
    return jax.jit(lambda params, c: drafter.propose(params, None, KEYS, c))


KEYS = jax.random.split(jax.random.key(0), 1)


def propose(text, drafter, params=None):
    """The block and the state after proposing."""
    tokens = np.full(
        (1, WIDTH), text[-1], np.int32
    )  # undefined entries must not matter
    tokens[0, : len(text)] = text
    context = jspec.Context(jnp.asarray(tokens), jnp.array([len(text)]), None)
    return jitted(drafter)(params, context)


def drafted(block):
    """Tokens on the way to every live node."""
    parent, token = np.asarray(block.parent[0]), np.asarray(block.token[0])
    assert (parent[1:] < np.arange(1, len(parent))).all()
    found = {0: ()}
    for i in range(1, len(token)):
        if block.live[0, i]:
            found[i] = (*found[int(parent[i])], int(token[i]))
    del found[0]
    assert len(set(found.values())) == len(found)  # no two siblings have one token
    return list(found.values())


def continuations(text, ending, texts):
    """What follows every occurrence of ``ending`` that something follows."""
    found = []
    for other in texts:
        for i in range(len(other) - len(ending)):
            if other[i : i + len(ending)] == ending:
                found.append(tuple(other[i + len(ending) :][:GAMMA]))
    return found


def count(found, path):
    return sum(c[: len(path)] == path for c in found)


def occurring(ending, texts):
    """How often ``ending`` occurs, also where nothing follows."""
    m = len(ending)
    return sum(t[i : i + m] == ending for t in texts for i in range(len(t) - m + 1))


class Published(NamedTuple):
    """What the published algorithm may draft: chances by suffix length, and its score,
    which depends on how ties between children are broken."""

    chances: list
    low: float
    high: float

    def drafts(self, found):
        """Scores that the drafted paths ``found`` have as drafts of some suffix."""
        return [
            sum(chance[p] for p in found)
            for chance in self.chances
            if all(p in chance for p in found)
        ]


def published(text, texts, rates, is_tree):
    chances, lows, highs = [], [0.0], [0.0]
    for m in range(1, min(len(text), LONGEST) + 1):
        found = continuations(text, text[-m:], texts)
        budget = min(GAMMA, int(m * rates.factor + rates.offset + 1e-6))
        total = max(occurring(text[-m:], texts), 1)
        every = {c[:d] for c in found for d in range(1, GAMMA + 1)} - {()}
        chance = {p: count(found, p) / total for p in every}
        chance = {p: x for p, x in chance.items() if x >= rates.least}
        chances.append(chance)
        if is_tree:
            scores = {sum(sorted(chance.values(), reverse=True)[: max(budget, 0)])}
        else:
            scores = chains(chance, (), budget)
        lows.append(min(scores))
        highs.append(max(scores))
    return Published(chances, max(lows), max(highs))


def chains(chance, end, budget):
    """Scores of all chains that follow a most frequent child, ties broken any way."""
    below = {p: x for p, x in chance.items() if p[:-1] == end}
    if budget <= 0 or not below:
        return {0.0}
    top = max(below.values())
    best = [p for p, x in below.items() if x == top]
    return {top + rest for p in best for rest in chains(chance, p, budget - 1)}


def check(block, state, *sources):
    """The score is the best one of the sources', and that of the drafts themselves."""
    score = float(state.score[0])
    assert max(s.low for s in sources) - 1e-5 <= score
    assert score <= max(s.high for s in sources) + 1e-5
    own = [x for source in sources for x in source.drafts(drafted(block))]
    assert any(abs(score - x) < 1e-5 for x in own)


@settings(max_examples=60)
@given(texts, st.sampled_from([Rates(), Rates(2.0, -1.0, 0.3)]), st.booleans())
def test_suffix_drafts_have_the_published_score(text, rates, is_tree):
    keep = drafters.suffix_tree if is_tree else path
    drafter = drafters.suffix(
        GAMMA, GAMMA + 1, keep, longest=LONGEST, rates=rates, candidates=MANY
    )
    block, state = propose(text, drafter)
    check(block, state, published(text, [text], rates, is_tree))


@settings(max_examples=40)
@given(texts, st.lists(texts, min_size=1, max_size=4))
def test_a_store_drafts_where_its_score_is_better(text, others):
    drafter = drafters.suffix(GAMMA, longest=LONGEST, candidates=MANY, stored=True)
    block, state = propose(text, drafter, padded(others))
    local = published(text, [text], Rates(), False)
    shared = published(text, others, Rates(), False)
    check(block, state, local, shared)


def padded(texts, size=200):
    """A store of one size for all examples: what fills it never occurs in a text."""
    used = sum(len(t) + 1 for t in texts)
    return store.build([*texts, [9] * (size - used - 1)]).on_device()


@settings(max_examples=60)
@given(texts, st.lists(texts, min_size=1, max_size=4))
def test_a_store_finds_every_occurrence(text, others):
    made = padded(others)
    tokens = np.zeros(WIDTH, np.int32)
    tokens[: len(text)] = text
    hits = SEARCH(made, jnp.asarray(tokens), jnp.int32(len(text)))
    for m in range(1, LONGEST + 1):
        ending = text[-m:]
        expected = occurring(ending, others) if m <= len(text) else 0
        assert int(hits.count[m - 1]) == expected
        if expected:
            live = np.asarray(hits.paths.live[m - 1])
            token = np.asarray(hits.paths.token[m - 1])
            found = sorted(
                tuple(t[a]) for t, a in zip(token, live, strict=True) if a.any()
            )
            assert found == sorted(c for c in continuations(text, ending, others) if c)


SEARCH = jax.jit(lambda s, t, n: store.search(s, t, n, LONGEST, MANY, GAMMA))


def test_a_large_range_is_sampled_evenly():
    """Of 900 occurrences two thirds go on with 1; so do two thirds of the sample."""
    made = store.build([[0, 1 if i % 3 else 2, 5] for i in range(900)]).on_device()
    hits = store.search(made, jnp.array([7, 0]), jnp.int32(2), 2, 30, 2)
    assert hits.count.tolist() == [900, 0]
    first = np.asarray(hits.paths.token[0, :, 0])
    assert np.bincount(first).tolist() == [0, 20, 10]


def test_a_store_survives_its_folder(tmp_path):
    made = store.build([[1, 2, 3], [2, 3]])
    store.save(made, tmp_path / "new" / "store")
    again = store.load(tmp_path / "new" / "store")
    assert again.tokens.tolist() == [1, 2, 3, -1, 2, 3, -1]
    assert again.order.tolist() == made.order.tolist()
    with pytest.raises(FileNotFoundError, match=r"no tokens\.npy"):
        store.load(tmp_path)


def test_stores_refuse_what_they_cannot_hold():
    with pytest.raises(ValueError, match="no token"):
        store.build([[], []])
    with pytest.raises(ValueError, match="id -4"):
        store.build([[1, -4]])
    with pytest.raises(ValueError, match="the id 61"):
        store.check_ids(store.build([[61]]), 61)


def test_rest_takes_the_longest_ngram_and_its_most_frequent_continuations():
    others = [[5, 6, 1, 2], [5, 6, 1, 3], [5, 6, 4], [6, 7], [6, 7], [6, 7], [6, 7]]
    drafter = drafters.rest(4, 2, longest=4, shortest=1, candidates=16)
    found = drafted(propose([0, 5, 6], drafter, padded(others))[0])
    assert found[0] == (1,)  # two of three; 7 follows the shorter n-gram only
    assert set(found[1:]) < {(4,), (1, 2), (1, 3)}
    assert drafted(propose([8, 8], drafter, padded(others))[0]) == []


def test_recency_and_frequency_order_the_tree():
    text = [5, 1, 5, 1, 5, 1, 5, 2, 5]
    options = dict(nodes=3, depth=1, longest=3, shortest=1)
    recent = drafters.ngram_tree(**options, order=drafters.recency)
    frequent = drafters.ngram_tree(**options, order=drafters.frequency)
    assert drafted(propose(text, frequent)[0]) == [(1,), (2,)]
    assert drafted(propose(text, recent)[0]) == [(2,), (1,)]


@settings(max_examples=40)
@given(texts)
def test_occurrences_are_the_best_ones(text):
    tokens = np.full(WIDTH, text[-1], np.int32)
    tokens[: len(text)] = text
    found = FIND(jnp.asarray(tokens), jnp.int32(len(text)))
    expected = []
    for i in range(len(text) - 1):
        m = 0
        while m < min(LONGEST, i + 1) and text[i - m] == text[-1 - m]:
            m += 1
        if m:
            expected.append((m, i, text[i + 1 : i + 1 + GAMMA]))
    expected.sort(reverse=True)
    assert [int(m) for m in found.match if m] == [m for m, _, _ in expected][:8]
    for k, (_, _, after) in enumerate(expected[:8]):
        assert found.paths.token[k][found.paths.live[k]].tolist() == after


FIND = jax.jit(lambda t, n: occurrences(t, n, LONGEST, 8, GAMMA))


def test_recycling_learns_from_rejected_rows():
    drafter = drafters.recycling(9, tree.from_paths([[0], [1], [0, 0]]))
    tokens = jnp.array([[1, 2, 1, 3, 0, 0]])
    context = jspec.Context(tokens, jnp.array([4]), None)
    state = drafter.init(None, context)
    assert state[0, 1].tolist() == [3, 2]  # the prompt's bigrams, the latest first
    block = jspec.types.Block(
        token=jnp.array([[3, 5, 6]]),
        parent=jnp.array([[-1, 0, 0]]),
        live=jnp.array([[True, True, False]]),
        vote=jnp.ones((1, 3), bool),
    )
    logits = jnp.zeros((1, 3, 9)).at[0, 0, 8].set(2).at[0, 0, 5].set(1)
    logits = logits.at[0, 1, 4].set(2).at[0, 1, 7].set(1)
    verdict = jspec.types.Verdict(
        jnp.array([[0, -1, -1]]), jnp.array([0]), jnp.array([8])
    )
    state = drafter.update(None, state, jspec.Feedback(block, verdict, logits))
    assert state[0, 3].tolist() == [8, 5]
    assert state[0, 5].tolist() == [4, 7]  # a rejected draft's row teaches as well
    assert state[0, 6].tolist() == [-1, -1]  # a dead one's does not
    assert drafted(drafter.propose(None, state, None, context)[0]) == [(8,), (5,)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: drafters.suffix(0), "gamma 0"),
        (lambda: drafters.suffix(rates=Rates(least=2.0)), r"2\.0"),
        (lambda: drafters.rest(1), "1 nodes"),
        (lambda: drafters.rest(longest=1), "2 .. 1"),
        (lambda: drafters.ngram_tree(depth=0), "depth 0"),
        (lambda: drafters.ngram_tree(shortest=9), "9 .. 5"),
    ],
)
def test_bad_sizes_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_match_too_long_to_rank_is_refused():
    with pytest.raises(ValueError, match="lower longest"):
        occurrences(jnp.zeros(1 << 20, jnp.int32), jnp.int32(5), 24, 8, 4)
