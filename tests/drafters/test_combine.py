"""Combinators, on drafters whose blocks are known beforehand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec import drafters, sampling
from jspec.types import POINT_MASS, Block, Drafter, DraftShape, Law, Verdict, chain

VOCAB = 11
CONTEXT = jspec.Context(
    jnp.array([[1, 2], [3, 4]]),
    jnp.array([2, 2]),
    sampling.options(2, vocab_size=VOCAB),
)
KEYS = jax.random.split(jax.random.key(0), 2)


def fixed(block, taps=(), depth=3, dense=False, name="fixed"):
    """Proposes one block for ever; its state is the features it saw last."""

    def update(params, state, feedback):
        return (
            jnp.zeros((2, 1)) if feedback.features is None else feedback.features[:, 0]
        )

    shape = DraftShape(block.token.shape[1], depth, taps, dense, widths=(1,))
    drafter = Drafter(
        shape,
        init=lambda params, context: jnp.zeros((2, 1)),
        propose=lambda params, state, key, context: (block, state),
        update=update,
    )
    return jspec.Draft(drafter, name=name)


def drafts(*rows, dead=()):
    """A chain a row; rows in ``dead`` draft nothing."""
    token = jnp.array(rows)
    live = jnp.ones(token.shape, bool).at[list(dead), 1:].set(False) if dead else None
    return chain(token, live)


SHORT = drafts([2, 7, 7], [4, 8, 8], dead=[1])
LONG = drafts([2, 5, 5, 5], [4, 6, 6, 6])


def propose(draft):
    state = draft.drafter.init(draft.params, CONTEXT)
    return draft.drafter.propose(draft.params, state, KEYS, CONTEXT)


def verdict(n_accept, depth=3):
    n = jnp.array(n_accept)
    step = jnp.arange(depth + 1)
    path = jnp.where(step <= n[:, None], step, -1)
    return Verdict(path, n, jnp.zeros(2, jnp.int32))


def told(block, n_accept, features=None):
    logits = jnp.zeros((*block.token.shape, VOCAB))
    return jspec.Feedback(block, verdict(n_accept), logits, features)


def test_fallback_chooses_row_by_row():
    both = drafters.fallback(fixed(SHORT), fixed(LONG))
    block, _ = propose(both)
    assert block.token.tolist() == [[2, 7, 7, 0], [4, 6, 6, 6]]
    assert block.live.tolist() == [[True] * 3 + [False], [True] * 4]
    assert block.parent[1].tolist() == [-1, 0, 1, 2]
    assert both.drafter.shape.nodes == 4 and both.drafter.shape.widths == (1, 3)


def test_a_law_is_forgotten_where_blocks_are_mixed():
    drawn = LONG.replace(law=Law(q=jnp.ones((2, 4, VOCAB)) / VOCAB))
    both = drafters.fallback(fixed(SHORT), fixed(drawn, dense=True))
    block, _ = propose(both)
    assert block.law == POINT_MASS and not both.drafter.shape.dense


def test_by_score_asks_the_first_ones_state():
    text = jspec.Context(
        jnp.array([[1, 2, 3, 1, 2, 3, 1, 2], [1, 2, 3, 4, 5, 6, 7, 8]]),
        jnp.array([8, 8]),
        CONTEXT.sampling,
    )
    first = jspec.Draft(drafters.suffix(3), name="suffix")
    for least, rows in ((1.0, [True, False]), (99.0, [False, False])):
        both = drafters.by_score(first, fixed(LONG), least)
        state = both.drafter.init(both.params, text)
        block, _ = both.drafter.propose(both.params, state, KEYS, text)
        copied = [t[1] == 3 for t in block.token.tolist()]
        assert copied == rows


def test_each_gets_the_features_of_its_own_taps():
    both = drafters.either(
        fixed(SHORT, taps=(0, 1)),
        fixed(LONG, taps=(2,)),
        lambda s, b: jnp.ones(2, bool),
    )
    assert both.drafter.shape.taps == (0, 1, 2)
    features = jnp.broadcast_to(jnp.arange(6.0), (2, 4, 6))  # two numbers a layer
    state = both.drafter.init(both.params, CONTEXT)
    one, two = both.drafter.update(both.params, state, told(LONG, [1, 1], features))
    assert one[0].tolist() == [0, 1, 2, 3] and two[0].tolist() == [4, 5]


def test_truncate_cuts_blocks():
    tree = Block(
        token=LONG.token,
        parent=jnp.array([[-1, 0, 0, 1]] * 2),
        live=LONG.live,
        vote=LONG.vote,
        law=Law(q=jnp.ones((2, 4, 5)), to_target=jnp.arange(5)),
    )
    cut = drafters.truncate(fixed(tree, dense=True), 3)
    block, _ = propose(cut)
    assert block.parent.tolist() == [[-1, 0, 0]] * 2
    assert block.law.q.shape == (2, 3, 5) and block.law.to_target.shape == (5,)
    assert cut.drafter.shape == DraftShape(3, 2, dense=True, widths=(1,))


def test_the_heuristic_is_that_of_transformers():
    draft = drafters.adaptive(fixed(LONG), drafters.heuristic(2))
    state = draft.drafter.init(None, CONTEXT)
    lengths = []
    for kept in ([2, 0], [3, 0], [1, -1]):
        block, state = draft.drafter.propose(None, state, KEYS, CONTEXT)
        lengths.append((block.live.sum(-1) - 1).tolist())
        state = draft.drafter.update(None, state, told(block, kept))
    assert lengths == [[2, 2], [3, 1], [3, 1]]  # never beyond the three there are
    assert state[1].tolist() == [2, 1]  # a row that ended has learnt nothing


def test_the_average_follows_what_was_kept():
    draft = drafters.adaptive(fixed(LONG), drafters.moving_average(0.5, 1.0, 2.0))
    state = draft.drafter.init(None, CONTEXT)
    for kept in ([0, 3], [0, 3]):
        block, state = draft.drafter.propose(None, state, KEYS, CONTEXT)
        state = draft.drafter.update(None, state, told(block, kept))
    np.testing.assert_allclose(state[1], [0.5, 2.75])
    block, _ = draft.drafter.propose(None, state, KEYS, CONTEXT)
    assert block.live.sum(-1).tolist() == [3, 4]


def test_confidence_ends_a_chain_after_an_unsure_draft():
    """The first draft of low confidence is the last one; see transformers."""
    sure = jnp.array([[0.9, 0.2, 0.9, 0], [0.1, 0.9, 0.9, 0]])
    q = jnp.zeros((2, 4, VOCAB)).at[..., 0].set(sure).at[..., 1].set(1 - sure)
    q = jnp.where(jnp.arange(VOCAB) < 2, q, 0)
    q = q.at[..., 1].set(0)  # what matters is the largest entry alone
    block = LONG.replace(law=Law(q=q))
    block, _ = propose(drafters.confident(fixed(block, dense=True), 0.4))
    assert block.live.tolist() == [
        [True, True, True, False],
        [True, True, False, False],
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: drafters.truncate(fixed(LONG), 5), "5 nodes of fixed"),
        (lambda: drafters.truncate(fixed(LONG), 1), "1 nodes of fixed"),
        (lambda: drafters.confident(fixed(LONG)), "no chain drawn from laws"),
        (lambda: drafters.confident(fixed(LONG, dense=True), 1.5), "least is 1.5"),
        (lambda: drafters.moving_average(0), "weight is 0"),
        (
            lambda: drafters.fallback(
                fixed(SHORT)._replace(vocab_size=5), fixed(LONG)._replace(vocab_size=6)
            ),
            "vocabulary of 5",
        ),
    ],
)
def test_bad_input_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
