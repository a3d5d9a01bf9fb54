"""Blocks grow as they should, whatever the network says."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import sampling, tree
from jspec.drafters import growth

VOCAB = 5
OPTIONS = sampling.options(1, vocab_size=VOCAB, eos_ids=(), temperature=1.0)
TABLE = jnp.asarray(np.random.default_rng(0).normal(size=(VOCAB, VOCAB)) * 1.5)


def extend(at, token, row):
    """A network whose next token depends on the last one; ``at`` counts its calls."""
    del row
    return TABLE[token], at + 1


def grown(grower, seed=0):
    logits = TABLE[jnp.array([0])]
    key = jax.random.split(jax.random.key(seed), 1)
    return jax.tree.map(
        lambda x: np.asarray(x)[0], grower.grow(extend, 0, logits, key, OPTIONS)
    )


def log_prob(path):
    law = np.asarray(jax.nn.log_softmax(TABLE, -1))
    return sum(law[a, b] for a, b in itertools.pairwise([0, *path]))


def paths_of(block):
    found = [()]
    for token, up in zip(block.token, block.parent, strict=True):
        found.append((*found[up], int(token)))
    return found[1:]


def test_ranked_takes_the_guess_of_every_rank():
    topology = tree.from_paths([[0], [2], [0, 1], [2, 0], [2, 0, 0]])
    block = grown(growth.ranked(topology))
    order = np.argsort(-np.asarray(TABLE), -1)
    expected = []
    for ranks in topology.paths:
        path = [0]
        for rank in ranks:
            path.append(int(order[path[-1], rank]))
        expected.append(tuple(path[1:]))
    assert paths_of(block) == expected
    np.testing.assert_allclose(block.score, [log_prob(p) for p in expected], rtol=1e-5)


def test_dynamic_keeps_the_most_probable_paths_it_saw():
    """With a width of the whole vocabulary it sees all paths."""
    block = grown(growth.dynamic(nodes=9, depth=3, width=VOCAB))
    every = [p for d in (1, 2, 3) for p in itertools.product(range(VOCAB), repeat=d)]
    # All paths of depth 3 hang on the best five of depth 2, and those are seen.
    best = sorted(every, key=log_prob, reverse=True)[:8]
    assert set(paths_of(block)) == set(best)
    assert (block.parent < np.arange(1, 9)).all()
    assert (np.diff(block.score) <= 0).all()


def test_dynamic_leaves_out_what_is_improbable():
    block = grown(growth.dynamic(nodes=9, depth=3, width=3, least=0.2))
    assert block.live.tolist() == (block.score >= np.log(0.2)).tolist()
    assert block.live.any() and not block.live.all()


def test_sampled_children_are_drawn_without_replacement_from_their_law():
    topology = tree.expansion([2, 2])
    block = grown(growth.sampled(topology))
    assert block.token[0] != block.token[1]
    assert block.token[2] != block.token[3] and block.token[4] != block.token[5]
    law = np.asarray(jax.nn.softmax(TABLE, -1))
    np.testing.assert_allclose(block.q[0], law[0], rtol=1e-5)
    np.testing.assert_allclose(block.q[1], law[block.token[0]], rtol=1e-5)
    np.testing.assert_allclose(block.q[2], law[block.token[1]], rtol=1e-5)
    assert (block.q[3:] == 0).all()


def test_sampled_pairs_have_the_law_of_two_draws():
    grower = growth.sampled(tree.expansion([2]))
    count = 4000
    keys = jax.random.split(jax.random.key(3), count)
    options = sampling.options(count, vocab_size=VOCAB, eos_ids=(), temperature=1.0)
    logits = jnp.broadcast_to(TABLE[0], (count, VOCAB))
    token = np.asarray(grower.grow(extend, 0, logits, keys, options).token)
    p = np.asarray(jax.nn.softmax(TABLE[0]))
    expected = p[:, None] * p / (1 - p[:, None]) * (1 - np.eye(VOCAB))
    seen = np.zeros((VOCAB, VOCAB))
    np.add.at(seen, (token[:, 0], token[:, 1]), 1)
    # Five standard deviations of a count.
    room = 5 * np.sqrt(count * expected * (1 - expected)) + 1e-9
    assert (np.abs(seen - count * expected) <= room).all()


def test_a_law_with_too_few_tokens_leaves_children_dead():
    cold = sampling.options(1, vocab_size=VOCAB, eos_ids=(), temperature=0.0)
    grower = growth.sampled(tree.expansion([2, 1]))
    key = jax.random.split(jax.random.key(0), 1)
    block = grower.grow(extend, 0, TABLE[jnp.array([0])], key, cold)
    assert block.live[0].tolist() == [True, False, True, False]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: growth.dynamic(1, 3, 3), "1 nodes"),
        (lambda: growth.dynamic(40, 2, 3), "40 nodes"),
        (lambda: growth.chain(0), "gamma is 0"),
        (lambda: growth.sampled(tree.from_paths([[1]])), "ranks"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
