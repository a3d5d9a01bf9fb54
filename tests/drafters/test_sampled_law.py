"""Sampled text of drafters with trees has the target's law, through the whole loop."""

import dataclasses

import jax
import numpy as np
import pytest
from scipy import stats

import jspec
from jspec import sampling, tree
from jspec.drafters import dspark, eagle, growth, peagle
from jspec.drafters.loading import block_draft
from jspec.testing import tiny
from jspec.train.block_starts import fresh_dflash, with_markov, with_selector
from jspec.train.starts import fresh_eagle1, fresh_eagle3

VOCAB, ROWS = 9, 1500
MODEL = tiny.model(seed=5, vocab_size=VOCAB, layers=2)
PROMPT = [1, 2, 3, 2]
PAIR = tree.from_paths([[0], [1], [0, 0], [0, 1]])


def eagle1(grower):
    head = fresh_eagle1(MODEL, jax.random.key(0))
    return jspec.Draft(eagle.drafter(head.design, grower), head.weights)


def eagle3(grower):
    ids = np.arange(0, VOCAB, 2, dtype=np.int32)
    head = fresh_eagle3(MODEL, (0, 1, 2), ids, jax.random.key(1))
    return jspec.Draft(eagle.drafter(head.design, grower), head.weights)


def parallel():
    ids = np.arange(0, VOCAB, 2, dtype=np.int32)
    head = fresh_eagle3(MODEL, (0, 1, 2), ids, jax.random.key(1))
    unknown = jax.random.normal(jax.random.key(6), (head.weights.fc.shape[1],))
    weights = head.weights.replace(mask_hidden=unknown)
    design = dataclasses.replace(head.design, mask_id=VOCAB - 1)
    return jspec.Draft(peagle.drafter(design, 2), weights)


def blocks(head=lambda head, key: head, **options):
    """A block-diffusion drafter whose joint and confidence heads say something."""
    k_fresh, k_own, k_shake = jax.random.split(jax.random.key(2), 3)
    given = fresh_dflash(MODEL, (0, 1), None, VOCAB - 1, k_fresh, layers=1, block=3)
    given = head(given, k_own)
    weights = given.weights
    leaves, form = jax.tree.flatten((weights.joint, weights.confidence))
    keys = jax.random.split(k_shake, len(leaves) + 1)
    moved = [
        x + jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=False)
    ]
    joint, confidence = jax.tree.unflatten(form, moved)
    weights = weights.replace(joint=joint, confidence=confidence)
    return block_draft(
        dataclasses.replace(given, weights=weights), "", MODEL, **options
    )


def markov():
    """Trusts the first draft of the first round, and others by the token before."""
    draft = blocks(
        lambda h, key: with_markov(h, key, 4, dspark.gated), gamma=2, least=0.5
    )
    sure, code = draft.params.confidence, draft.params.joint.before[PROMPT[-1]]
    weight = sure.weight.at[:, :-4].set(0)
    sure = sure.replace(weight=weight, bias=0.5 - weight[:, -4:] @ code)
    return draft._replace(params=draft.params.replace(confidence=sure))


CASES = {
    "sampled tree": lambda: eagle1(growth.sampled(PAIR)),
    "dynamic tree": lambda: eagle1(growth.dynamic(5, 2, 3, least=0.05, widths=(1,))),
    "chain over half of the vocabulary": lambda: eagle3(growth.chain(2)),
    "rows of one pass": parallel,
    "independent rows": blocks,
    "few candidates": lambda: blocks(lambda h, key: with_selector(h, key, 4, count=3)),
    "confident prefixes": markov,
}


def joint_law(temperature):
    """The target's law of the next two tokens, ``[V, V]``."""
    rows = [[*PROMPT, x] for x in range(VOCAB)]
    options = sampling.options(1, vocab_size=VOCAB, eos_ids=(), temperature=temperature)

    def after(tokens):
        state = jspec.prepare(MODEL, None, [tokens], max_new_tokens=1).prefill()
        block = jspec.types.chain(np.asarray([tokens[-1:]]))
        logits = MODEL.target.score(MODEL.params, state.cache, block).logits
        return np.asarray(sampling.draft_law(logits[:, 0], options)[0], np.float64)

    return after(PROMPT)[:, None] * np.stack([after(row) for row in rows])


@pytest.mark.parametrize("name", CASES)
def test_two_tokens_have_the_targets_law(name):
    out = jspec.generate(
        MODEL,
        CASES[name](),
        [PROMPT] * ROWS,
        max_new_tokens=2,
        temperature=1.3,
        seed=list(range(ROWS)),
        eos_ids=(),
    )
    seen = np.zeros((VOCAB, VOCAB))
    np.add.at(seen, tuple(np.asarray(out.tokens).T), 1)
    expected = ROWS * joint_law(1.3)
    rare = expected < 5
    seen = np.append(seen[~rare], seen[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    chi = np.sum((seen - expected) ** 2 / expected)
    assert out.stats.accepted > ROWS // 20  # the rule has had something to say
    assert chi < stats.chi2.ppf(0.999, len(seen) - 1)
