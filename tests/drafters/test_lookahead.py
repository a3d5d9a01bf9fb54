"""Lookahead against a slow and obvious reference that keeps lists and a dict."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec import sampling, verify
from jspec.drafters import jacobi, lookahead
from jspec.drafters.lookahead import Lookahead, _store
from jspec.testing import tiny
from jspec.types import Noise, TargetLaw

VOCAB = 7
PROMPT = [3, 1, 4, 1, 5]
W, N, G = 3, 4, 2


@functools.cache
def says(path):
    """The target of this test: a next token for every text, from its last three tokens."""
    return int(np.random.default_rng(path[-3:]).integers(VOCAB))


class Reference:
    """The published algorithm for one sequence: levels are lists, the pool is a dict."""

    def __init__(self, start):
        self.levels, self.pool, self.text = [list(start)], {}, list(PROMPT)

    def guesses(self):
        return self.pool.get(self.text[-1], [])[::-1][:G]  # the latest first

    def visible(self, level, j):
        """What token j of a level sees of the window, itself included."""
        column = j if level else j + 1
        path = self.levels[0][:column]
        return path + [self.levels[k][j] for k in range(1, level + 1)]

    def step(self):
        guesses = self.guesses()
        best = []
        for guess in guesses:
            kept = []
            for token in guess:
                if token != says(tuple(self.text + kept)):
                    break
                kept.append(token)
            best = max(best, kept, key=len)
        newest = len(self.levels) - 1
        if newest:
            rows = [self.visible(newest, j) for j in range(len(self.levels[newest]))]
        else:
            rows = [self.levels[0][: j + 1] for j in range(len(self.levels[0]))]
        said = [says(tuple(self.text + row)) for row in rows]
        if newest < N - 2:
            said = said[1:] if newest else said
            self.levels = [level[1:] for level in self.levels] + [said]
        else:
            keys = [self.text[-1], *self.levels[0]]
            for j in range(W):
                gram = (*(level[j] for level in self.levels[1:]), said[j])
                stored = self.pool.setdefault(keys[j], [])
                if gram in stored:
                    stored.remove(gram)
                stored.append(gram)
            self.levels = [self.levels[1][1:], *self.levels[2:], said]
        kept = best
        self.text += [*kept, says(tuple(self.text + kept))]
        return guesses, len(kept)


def answers(text, block):
    """One-hot logits of what ``says`` says at every node."""
    parent, token = np.asarray(block.parent[0]), np.asarray(block.token[0])
    paths, logits = [list(text)], np.zeros((1, len(token), VOCAB), np.float32)
    for i in range(len(token)):
        if i:
            paths.append([*paths[parent[i]], int(token[i])])
        logits[0, i, says(tuple(paths[i]))] = 1
    return jnp.asarray(logits)


def test_every_round_is_the_references():
    drafter = lookahead(W, N, G, pool=256)
    options = sampling.options(1, vocab_size=VOCAB)
    tokens = np.zeros((1, 200), np.int32)
    tokens[0, : len(PROMPT)] = PROMPT
    propose, update = jax.jit(drafter.propose), jax.jit(drafter.update)
    context = jspec.Context(jnp.asarray(tokens), jnp.array([len(PROMPT)]), options)
    state = drafter.init(None, context)
    slow = Reference(np.asarray(state.window)[0, 0, 1:].tolist())
    full_matches = 0
    for _ in range(40):
        text = list(slow.text)
        tokens[0, : len(text)] = text
        context = jspec.Context(jnp.asarray(tokens), jnp.array([len(text)]), options)
        block, state = propose(None, state, None, context)
        guesses, kept = slow.step()
        full_matches += kept == N - 1
        assert _paths(block) == {g[: i + 1] for g in guesses for i in range(N - 1)}
        logits = answers(text, block)
        verdict = judge(logits, block)
        assert int(verdict.n_accept[0]) == kept
        assert int(verdict.next_token[0]) == slow.text[-1]
        state = update(None, state, jspec.Feedback(block, verdict, logits))
    assert full_matches  # and each of them with its bonus
    assert _pool(state) == {
        (key, *gram) for key, grams in slow.pool.items() for gram in grams
    }


@jax.jit
def judge(logits, block):
    law = TargetLaw(logits, sampling.argmax(logits))
    noise = Noise(logits[..., 0], logits[:, 0, 0], logits)
    verdict = verify.batched(verify.greedy)(noise, block, law)
    return dataclasses.replace(verdict, path=verdict.path[:, :N])


def _paths(block):
    """Tokens on the way to every node that may be kept."""
    parent, token = np.asarray(block.parent[0]), np.asarray(block.token[0])
    found = {0: ()}
    for i in range(1, len(token)):
        if block.live[0, i] and block.vote[0, i]:
            found[i] = (*found[int(parent[i])], int(token[i]))
    assert len(set(found.values())) == len(found)  # no two siblings have one token
    return set(found.values()) - {()}


def _pool(state):
    return {tuple(g) for g in np.asarray(state.pool[0]).tolist() if g[0] >= 0}


def test_a_small_pool_forgets_what_was_not_seen_for_longest():
    state = Lookahead(
        window=jnp.zeros((2, 3), jnp.int32),
        levels=jnp.int32(2),
        pool=jnp.full((3, 3), -1),
        used=jnp.zeros(3, jnp.int32),
        clock=jnp.int32(0),
    )
    grams = jnp.array([[1, 1, 1], [2, 2, 2], [3, 3, 3], [4, 4, 4], [4, 4, 4]])
    for some in ([0, 1], [2, 0], [3, 4]):  # 1 is seen again, 2 is the oldest
        state = _store(state, grams[jnp.array(some)])
    assert sorted(np.asarray(state.pool)[:, 0].tolist()) == [1, 3, 4]


@pytest.mark.parametrize(
    ("drafter", "tau"), [(lookahead(4, 4, 4), 1.2), (jacobi(4), 1.0)]
)
def test_guesses_are_kept(drafter, tau):
    model = tiny.model(seed=3)
    options = dict(max_new_tokens=80, eos_ids=())
    out = jspec.generate(model, drafter, [1, 2, 3], **options)
    assert out.tokens == jspec.generate(model, None, [1, 2, 3], **options).tokens
    assert out.stats.tau > tau


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jacobi(0), "gamma is 0"),
        (lambda: lookahead(0, 4, 2), "window 0"),
        (lambda: lookahead(3, 2, 2), "n-grams of 2"),
        (lambda: lookahead(3, 4, 0), "0 guesses"),
        (lambda: lookahead(8, 4, 2, pool=4), "a pool of 4"),
    ],
)
def test_bad_sizes_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
