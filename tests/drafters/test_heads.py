"""Heads against loops in numpy: what they compute, what they propose, what they refuse."""

import fitted
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec import drafters, tree
from jspec.drafters import feature_heads, growth, heads
from jspec.drafters.hydra import Hydra, HydraHead, hydra_output, init_hydra
from jspec.drafters.multi_token import (
    empty_cache,
    init_multi_token,
    multi_token_forward,
)
from jspec.testing import tiny
from jspec.types import Block, Feedback, Verdict

MODEL = tiny.model(seed=3)
CONFIG = MODEL.config
VOCAB, WIDTH = CONFIG.vocab_size, CONFIG.hidden
TREE = tree.from_paths([[0], [2], [0, 1], [2, 0], [2, 3], [2, 0, 0], [2, 0, 4]])
TEXTS = [[5, 9, 2, 7], [3], [8, 8, 1]]


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def medusa_weights(rows=VOCAB, layers=1, to_target=None, count=3):
    return heads.Medusa(
        tuple(
            heads.MedusaHead(
                weight=normal(3 * k, WIDTH, WIDTH) / 6,
                bias=normal(3 * k + 1, WIDTH),
                vocab=normal(3 * k + 2, rows, WIDTH),
            )
            for k in range(count)
        ),
        to_target=to_target,
        layers=layers,
    )


def blockwise_weights(count=3, wide=5):
    return heads.Blockwise(
        up=normal(1, count * wide, WIDTH),
        up_bias=normal(2, count * wide),
        down=normal(3, count, WIDTH, count * wide),
        down_bias=normal(4, count, WIDTH),
        vocab=normal(5, VOCAB, WIDTH),
    )


def hydra_weights(count=3):
    def head(k):
        wide = (k + 2) * WIDTH
        return HydraHead(
            weight=normal(5 * k, WIDTH, wide) / 6,
            bias=normal(5 * k + 1, WIDTH),
            skip=normal(5 * k + 2, WIDTH, wide) / 6,
            skip_bias=normal(5 * k + 3, WIDTH),
            vocab=normal(5 * k + 4, VOCAB, WIDTH),
        )

    return Hydra(tuple(map(head, range(count))), embed=normal(77, VOCAB, WIDTH))


def silu(x):
    return x / (1 + np.exp(-x))


def medusa_loop(weights, k, feature, path):
    del path
    head = jax.tree.map(np.asarray, weights.heads[k])
    for _ in range(weights.layers):
        feature = feature + silu(head.weight @ feature + head.bias)
    return head.vocab @ feature


def blockwise_loop(weights, k, feature, path):
    del path
    w = jax.tree.map(np.asarray, weights)
    hidden = np.maximum(w.up @ feature + w.up_bias, 0)
    return w.vocab @ (feature + w.down[k] @ hidden + w.down_bias[k])


def hydra_loop(weights, k, feature, path):
    head, embed = jax.tree.map(np.asarray, (weights.heads[k], weights.embed))
    u = np.concatenate([feature, *(embed[token] for token in path)])
    x = head.skip @ u + head.skip_bias + silu(head.weight @ u + head.bias)
    return head.vocab @ x


def context_of(texts, features):
    tokens = np.zeros((len(texts), 8), np.int32)
    for row, ids in zip(tokens, texts, strict=True):
        row[: len(ids)] = ids
    length = jnp.array([len(ids) for ids in texts])
    return jspec.Context(jnp.asarray(tokens), length, None, features)


def propose(drafter, weights, texts=TEXTS):
    """The first block after prefill, and the random features it is drafted from."""
    features = normal(9, len(texts), 8, WIDTH)
    context = context_of(texts, features)
    state = drafter.init(weights, context)
    block, _ = jax.jit(drafter.propose)(weights, state, None, context)
    return block, features


FAMILIES = {
    "medusa": (drafters.medusa, medusa_weights(), medusa_loop),
    "medusa-two-layers": (drafters.medusa, medusa_weights(layers=2), medusa_loop),
    "blockwise": (drafters.blockwise, blockwise_weights(), blockwise_loop),
    "hydra": (drafters.hydra, hydra_weights(), hydra_loop),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_nodes_take_their_rank_in_their_heads_list(name):
    make, weights, loop = FAMILIES[name]
    block, features = propose(make(weights, VOCAB, TREE), weights)
    for row, text in enumerate(TEXTS):
        assert block.token[row, 0] == text[-1]
        if len(text) == 1:
            continue
        feature = np.asarray(features)[row, len(text) - 2]
        paths = [[text[-1]]]
        for up, rank in zip(TREE.parent[1:], TREE.rank[1:], strict=True):
            logits = loop(weights, len(paths[up]) - 1, feature, paths[up])
            paths.append([*paths[up], int(np.argsort(-logits)[rank])])
        assert block.token[row].tolist() == [path[-1] for path in paths]
        assert block.parent[row].tolist() == list(TREE.parent)


def test_without_a_feature_there_is_no_draft():
    weights = medusa_weights()
    block, _ = propose(drafters.medusa(weights, VOCAB, TREE), weights)
    live = np.ones((3, TREE.nodes), bool)
    live[1, 1:] = False  # the prompt of one token
    np.testing.assert_array_equal(block.live, live)
    assert block.law.q is None


def test_a_dynamic_tree_holds_the_most_probable_paths():
    grower = growth.dynamic(nodes=5, depth=2, width=3)
    weights = medusa_weights()
    block, features = propose(drafters.medusa(weights, VOCAB, grower), weights)
    for row, ids in enumerate(TEXTS):
        feature = features[row, max(len(ids) - 2, 0)]
        logits = [medusa_loop(weights, k, np.asarray(feature), None) for k in (0, 1)]
        first, second = (z - np.log(np.sum(np.exp(z))) for z in logits)
        paths = {(a,): first[a] for a in range(VOCAB)}
        paths |= {
            (a, b): first[a] + second[b]
            for a in np.argsort(first)[-3:].tolist()
            for b in np.argsort(second)[-3:].tolist()
        }
        best = sorted(paths, key=paths.__getitem__)[-4:]
        token, parent = np.asarray(block.token[row]), np.asarray(block.parent[row])
        found = [
            (int(token[i]),)
            if not parent[i]
            else (int(token[parent[i]]), int(token[i]))
            for i in range(1, 5)
        ]
        if len(ids) > 1:
            assert sorted(found) == sorted(best)
    with pytest.raises(ValueError, match="4 levels deep, but there are 3 heads"):
        drafters.medusa(weights, VOCAB, growth.dynamic(5, 4, 3))


def test_fresh_heads_guess_what_the_target_itself_would():
    feature, path = normal(1, 4, WIDTH), jnp.zeros((4, 2), jnp.int32)
    vocab = normal(2, VOCAB, WIDTH)
    blockwise = heads.init_blockwise(jax.random.key(0), vocab, 2, wide=3)
    hydra = init_hydra(normal(3, VOCAB, WIDTH), vocab, 2)
    for output in (
        heads.medusa_output(heads.init_medusa(vocab, 2, layers=2), 1, feature),
        heads.blockwise_output(blockwise, 1, feature),
        hydra_output(hydra, 1, feature, path),
    ):
        np.testing.assert_array_equal(output, feature)
    assert blockwise.vocab is vocab and hydra.heads[1].vocab is vocab


def test_the_targets_last_layer_as_a_head_is_the_target():
    tokens = jnp.array([[5, 9, 2, 7, 1, 30]])
    block = jspec.chain(tokens)
    cache = MODEL.target.init_cache(1, 8, jnp.float32)
    tap = CONFIG.layers - 1
    own = MODEL.target.score(MODEL.params, cache, block, taps=(tap,))
    weights = init_multi_token(MODEL.params, 2)
    empty = empty_cache(weights, CONFIG, 1, 8, jnp.float32)
    hidden, _ = multi_token_forward(weights, own.features, empty, CONFIG)
    for k in range(2):
        logits = hidden[:, :, k] @ weights.vocab.T
        np.testing.assert_allclose(logits, own.logits, rtol=1e-5, atol=1e-5)


def test_a_draft_vocabulary_drafts_target_ids():
    to_target = jnp.array([40, 3, 17, 60, 8, 22], jnp.int32)
    small = medusa_weights(rows=6, to_target=to_target)
    full = medusa_weights(rows=6)
    make = drafters.medusa
    block, _ = propose(make(small, VOCAB, TREE), small)
    drafts, _ = propose(make(full, VOCAB, TREE), full)
    np.testing.assert_array_equal(
        block.token[:, 1:], np.asarray(to_target)[drafts.token[:, 1:]]
    )


def test_rows_that_pad_a_head_are_never_drafted():
    weights = medusa_weights(rows=VOCAB + 3)
    loud = [h.replace(vocab=h.vocab.at[VOCAB:].mul(100)) for h in weights.heads]
    loud = weights.replace(heads=tuple(loud))
    block, _ = propose(drafters.medusa(loud, VOCAB + 3, TREE), loud)
    assert int(block.token.max()) >= VOCAB  # they would win
    block, _ = propose(drafters.medusa(loud, VOCAB, TREE), loud)
    quiet = jax.tree.map(lambda x: x, weights).replace(
        heads=tuple(h.replace(vocab=h.vocab[:VOCAB]) for h in weights.heads)
    )
    expected, _ = propose(drafters.medusa(quiet, VOCAB, TREE), quiet)
    np.testing.assert_array_equal(block.token, expected.token)


def test_the_feature_of_the_last_accepted_node_is_kept():
    features = normal(3, 3, 4, WIDTH)
    old = normal(4, 3, WIDTH)
    path = jnp.array([[0, 2, 3], [0, -1, -1], [-1, -1, -1]])
    verdict = Verdict(path, jnp.array([2, 0, -1]), jnp.zeros(3, jnp.int32))
    nothing = jnp.zeros((3, 4), jnp.int32)
    block = Block(nothing, nothing, nothing > 0, nothing > 0)
    feedback = Feedback(block, verdict, logits=nothing, features=features)
    new = feature_heads.accepted_feature(None, old, feedback)
    np.testing.assert_array_equal(new, [features[0, 3], features[1, 0], old[2]])


def test_chunks_of_the_prompt_give_the_same_state():
    layers = tiny.model(seed=8, layers=2).params.layers
    weights = fitted.MultiToken(layers, MODEL.params.final_norm, MODEL.params.head)
    features = normal(5, 3, 8, WIDTH)
    context = context_of(TEXTS, features)
    states = [
        drafters.multi_token(weights, CONFIG, chunk=chunk).init(weights, context)
        for chunk in (1, 2, 8)
    ]
    for state in states[1:]:
        np.testing.assert_allclose(state.hidden, states[0].hidden, atol=2e-5)
        assert state.cache.length.tolist() == [3, 0, 2]
        for k, first in zip(state.cache.k, states[0].cache.k, strict=True):
            np.testing.assert_allclose(k[0, ..., :3], first[0, ..., :3], atol=2e-5)
    assert not states[0].hidden[1].any()  # the prompt of one token


LAYERS = init_multi_token(MODEL.params, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: drafters.medusa(medusa_weights(), VOCAB), "4 levels .* 3 heads"),
        (lambda: drafters.hydra(hydra_weights(2), VOCAB, TREE), "3 levels .* 2 heads"),
        (
            lambda: drafters.blockwise(blockwise_weights(), VOCAB, tree.line(4)),
            "4 levels .* 3 heads",
        ),
        (
            lambda: drafters.multi_token(LAYERS, CONFIG, tree.line(3)),
            "3 levels .* 2 heads",
        ),
        (
            lambda: drafters.medusa(medusa_weights(rows=4), VOCAB, TREE),
            "5 best tokens .* only 4",
        ),
        (
            lambda: drafters.medusa(
                medusa_weights(rows=9, to_target=jnp.arange(8)), VOCAB, TREE
            ),
            r"shape \(8,\).* 9 rows",
        ),
        (
            lambda: drafters.medusa(
                medusa_weights(rows=9, to_target=jnp.arange(9) + 53), VOCAB, TREE
            ),
            "53 to 61.* 61 tokens",
        ),
    ],
)
def test_trees_and_vocabularies_that_do_not_fit_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_equal_arguments_give_equal_drafters():
    """Drafters are static under jit: other weights of one form share a program."""
    one = drafters.medusa(medusa_weights(), VOCAB, TREE)
    assert one == drafters.medusa(medusa_weights(layers=2), VOCAB, TREE)
    assert hash(one) == hash(drafters.medusa(medusa_weights(), VOCAB, TREE))
    layers = drafters.multi_token(LAYERS, CONFIG)
    assert layers == drafters.multi_token(LAYERS, CONFIG)
