"""EAGLE heads against recordings of the original code."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity import CLOSE, DATA, ids, paths, recorded, retrieved_paths

import jspec
from jspec import tree
from jspec.drafters import eagle, growth, peagle
from jspec.drafters.published_eagle import load_eagle
from jspec.testing import tiny

CASES = {  # head -> (target, tokens drafted from)
    "eagle1_L1": "eagle1_target",
    "eagle2_good": "eagle2_good_target",
    "eagle3": "eagle23_target",
}


@pytest.fixture(scope="module")
def target():
    loaded = {}

    def load(name):
        if name not in loaded:
            loaded[name] = jspec.load(DATA / name, dtype="float32")
        return loaded[name]

    return load


def forward(head, features, token, cache=None):
    """Outputs of a chain of pairs, and their keys and values."""
    net = eagle.net(head.design)
    if cache is None:
        cache = net.init_cache(1, 32, jnp.float32)
    rows = token.shape[1]
    mask = jnp.tril(jnp.ones((1, rows, rows), bool))
    hidden = net.fuse(head.weights, jnp.asarray(features))
    depth = jnp.arange(rows)[None]
    with jax.default_matmul_precision("highest"):
        return net.step(head.weights, cache, ids(token), hidden, mask, depth, None)


@pytest.mark.parametrize("name", CASES)
def test_forward(name, target):
    head, io = load_eagle(DATA / name, target(CASES[name])), recorded(name)
    if name == "eagle1_L1":
        # Recorded before the target's embedding was put in. The vectors of the eight
        # tokens were solved for from eight rows of ``out``; the ninth row, whose token
        # comes twice, and the three of ``out_cached`` are left to be predicted.
        own = recorded(name, "io_embedding")["embed_tokens.weight"]
        weights = dataclasses.replace(head.weights, embed=jnp.asarray(own))
        head = dataclasses.replace(head, weights=weights)
    out, kv = forward(head, io["hidden"], io["input_ids"])
    np.testing.assert_allclose(out, io["out"], **CLOSE)
    if "logits" in io:
        logits = eagle.logits(head.design, head.weights, out)
        np.testing.assert_allclose(logits, io["logits"], **CLOSE)
    if "out_cached" in io:
        cache = eagle.net(head.design).init_cache(1, 32, jnp.float32)
        nine = jnp.arange(9)[None]
        cache = cache.append(kv, nine, jnp.array([9]))
        out, _ = forward(head, io["hidden"][:, :3], io["input_ids"][:, :3], cache)
        np.testing.assert_allclose(out, io["out_cached"], **CLOSE)


def first_block(model, head, grower, prompt):
    """The prompt, the token that follows it, and the block drafted after that."""
    pending = jspec.generate(model, None, [prompt], max_new_tokens=1, eos_ids=())
    draft = jspec.Draft(eagle.drafter(head.design, grower), head.weights)
    prompt = [*prompt, *pending.tokens[0]]
    request = jspec.prepare(model, draft, [prompt], max_new_tokens=8)
    state = request.prefill()
    keys, _ = jspec.sampling.row_keys(state.sampling, state.round)
    context = jspec.Context(state.tokens, state.length, state.sampling)
    block, _ = draft.drafter.propose(draft.params, state.draft, keys, context)
    return prompt, jax.tree.map(lambda x: np.asarray(x)[0], block)


@pytest.mark.parametrize("name", ["eagle2_good", "eagle3"])
def test_dynamic_tree(name, target):
    model, io = target(CASES[name]), recorded(name)
    head = load_eagle(DATA / name, model)
    grower = growth.dynamic(nodes=16, depth=5, width=5)
    _, block = first_block(model, head, grower, io["prompt"][0].tolist())
    theirs = io["tree_tokens"][0]
    assert block.token[0] == theirs[0]
    assert paths(block.token, block.parent) == retrieved_paths(theirs, io["retrieve"])
    mask = tree.ancestors(jnp.asarray(block.parent))
    assert sorted(tree.depth(mask).tolist()) == sorted(io["pos"].tolist())


def test_static_tree(target):
    model, io = target("eagle1_target"), recorded("eagle1_L1", "draft_io")
    head = load_eagle(DATA / "eagle1_L1", model)
    grower = growth.ranked(tree.EAGLE_25)
    _, block = first_block(model, head, grower, io["prompt"][0].tolist())
    # Their rows: guesses after the root, then after every node that has children.
    inner = sorted({p[:-1] for p in tree.EAGLE_25.paths}, key=lambda p: (len(p), p))
    guesses = dict(zip(inner, io["tokens"], strict=True))
    for path, token in zip(tree.EAGLE_25.paths, block.token[1:], strict=True):
        assert token == guesses[path[:-1]][path[-1]], path


@pytest.mark.parametrize("name", CASES)
def test_greedy_loop(name, target):
    model = target(CASES[name])
    io = recorded(name, "draft_io" if name == "eagle1_L1" else "io")
    prompt = io["prompt"][0].tolist()
    expected = io["greedy"][0, len(prompt) :].tolist()
    head = load_eagle(DATA / name, model)
    static = name == "eagle1_L1"
    grower = growth.ranked(tree.EAGLE_25) if static else growth.dynamic(16, 5, 5)
    draft = jspec.Draft(eagle.drafter(head.design, grower), head.weights)
    out = jspec.generate(
        model, draft, [prompt], max_new_tokens=len(expected), eos_ids=()
    )
    assert out.tokens[0] == expected
    if name == "eagle2_good":
        assert out.stats.tau > 1.5


def test_parallel_rows():
    """P-EAGLE's training rows (anchor, depth): any of them may be a mask row."""
    name = "spec_peagle_llama"
    head = load_eagle(DATA / name, tiny.model(vocab_size=96, hidden=32, layers=6))
    design, weights, io = head.design, head.weights, recorded(name)
    anchor, depth = io["out.anchor_pos"], io["out.depth"]
    place, first = anchor + depth, depth == 0
    document = io["in.document_ids"][0][place]
    token = np.where(first, io["in.input_ids"][0][place], design.mask_id)[None]
    features = np.where(
        first[:, None], io["in.hidden_states"][0][place], weights.mask_hidden
    )[None]
    committed = first & (anchor <= anchor[:, None])
    own = (anchor == anchor[:, None]) & (depth <= depth[:, None])
    mask = (document == document[:, None]) & (committed | own)
    cache = eagle.net(design).init_cache(1, 8, jnp.float32)
    with jax.default_matmul_precision("highest"):
        hidden = eagle.fuse(design, weights, jnp.asarray(features))
        out, _ = eagle.step(
            design,
            weights,
            cache,
            ids(token),
            hidden,
            jnp.asarray(mask[None]),
            ids(place[None]),
            None,
        )
        logits = eagle.logits(design, weights, out)
    inside = document >= 0
    np.testing.assert_allclose(logits[0][inside], io["out.logits"][0][inside], **CLOSE)


def test_a_round_is_rows_of_one_anchor():
    """What is drafted after committed pairs equals training rows of the last anchor."""
    name = "spec_peagle_llama"
    head = load_eagle(DATA / name, tiny.model(vocab_size=96, hidden=32, layers=6))
    design, weights, io = head.design, head.weights, recorded(name)
    features = jnp.asarray(io["in.hidden_states"][:, :4])
    token = ids(io["in.input_ids"][:, :4])
    out, kv = forward(head, features, token)
    cache = eagle.net(design).init_cache(1, 32, jnp.float32)
    cache = cache.append(kv, jnp.arange(4)[None], jnp.asarray([4]))
    drafted = peagle.masked(design, weights, cache, 2)
    more = jnp.broadcast_to(weights.mask_hidden, (1, 2, features.shape[-1]))
    token = jnp.concatenate([token, jnp.full((1, 2), design.mask_id)], 1)
    whole, _ = forward(head, jnp.concatenate([features, more], 1), token)
    np.testing.assert_allclose(drafted, whole[:, 4:], **CLOSE)
    with pytest.raises(ValueError, match="drafts chains; use gamma"):
        jspec.load_drafter(
            DATA / name,
            tiny.model(vocab_size=96, hidden=32, layers=6),
            grower=growth.dynamic(7, 3, 3),
        )
    with pytest.raises(ValueError, match="no mask token"):
        peagle.drafter(dataclasses.replace(design, mask_id=None))
