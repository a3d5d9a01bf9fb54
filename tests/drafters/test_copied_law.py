"""Sampled text of drafters without training has the target's law, through the whole loop.

Four tokens over a vocabulary of four: what a drafter has learnt in the first rounds, from
the very tokens it is judged with, decides what it drafts in later ones.
"""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jspec
from jspec import drafters, sampling, tree
from jspec.drafters import store
from jspec.prefill import fill_cache
from jspec.testing import tiny

VOCAB, ROWS, NEW, HEAT = 4, 1500, 4, 1.2
MODEL = tiny.model(seed=5, vocab_size=VOCAB)
PROMPT = [1, 2, 3, 2]
TREE = tree.from_paths([[0], [1], [0, 0], [0, 1]])


def stored():
    return store.build(
        [[2, 3, 0, 1], [2, 3, 1, 2], [2, 0, 0, 3], [3, 2, 1, 1]]
    ).on_device()


def named(drafter, params=None):
    return jspec.Draft(drafter, params, vocab_size=VOCAB)


CASES = {
    "lookahead": lambda: named(drafters.lookahead(2, 3, 3)),
    "jacobi, as long as pays": lambda: drafters.adaptive(
        named(drafters.jacobi(3)), drafters.moving_average()
    ),
    "recycling": lambda: named(drafters.recycling(VOCAB, TREE)),
    "ngram tree": lambda: named(drafters.ngram_tree(6, 3, shortest=1)),
    "suffix": lambda: named(drafters.suffix(3, 5, drafters.suffix_tree)),
    "rest": lambda: named(drafters.rest(6, 3, shortest=1), stored()),
    "first layer while sure": lambda: drafters.confident(
        drafters.self_model(MODEL, 1, 3), 0.5
    ),
    "suffix, else first layer": lambda: drafters.by_score(
        named(drafters.suffix(3)), drafters.self_model(MODEL, 1, 3), 0.4
    ),
}


@pytest.fixture(scope="module")
def law():
    """The target's law of the next four tokens, ``[V] * 4``, from one batch of prefixes."""
    texts = [[*PROMPT, *x] for x in itertools.product(range(VOCAB), repeat=NEW - 1)]
    tokens = jnp.asarray(texts)
    length = jnp.full(len(texts), len(PROMPT))
    cache, _ = fill_cache(MODEL.target, MODEL.params, tokens, length, slots=16, chunk=8)
    block = jspec.types.chain(tokens[:, len(PROMPT) - 1 :])
    logits = MODEL.target.score(MODEL.params, cache, block).logits
    options = sampling.options(len(texts), vocab_size=VOCAB, temperature=HEAT)
    p = np.asarray(sampling.target_law(logits, options).p, np.float64)
    joint = np.zeros([VOCAB] * NEW)
    for path, rows in zip(
        itertools.product(range(VOCAB), repeat=NEW - 1), p, strict=True
    ):
        chance = np.prod([rows[i, x] for i, x in enumerate(path)])
        joint[path] = chance * rows[NEW - 1]
    return joint


@pytest.mark.parametrize("name", CASES)
def test_four_tokens_have_the_targets_law(name, law):
    out = jspec.generate(
        MODEL,
        CASES[name](),
        [PROMPT] * ROWS,
        max_new_tokens=NEW,
        temperature=HEAT,
        seed=list(range(ROWS)),
        eos_ids=(),
    )
    seen = np.zeros([VOCAB] * NEW)
    np.add.at(seen, tuple(np.asarray(out.tokens).T), 1)
    seen, expected = seen.ravel(), ROWS * law.ravel()
    rare = expected < 5
    seen = np.append(seen[~rare], seen[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    chi = np.sum((seen - expected) ** 2 / expected)
    assert out.stats.accepted > ROWS // 10  # the rule has had something to say
    assert chi < stats.chi2.ppf(0.999, len(seen) - 1)
