"""One suite that every drafter passes."""

import dataclasses

import chex
import fitted
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec import decode, drafters, tree, verify
from jspec.cache import KVCache
from jspec.drafters import assistant, dspark, eagle, growth, mtp, peagle, store
from jspec.drafters.loading import block_draft
from jspec.models import transformer
from jspec.prefill import fill_cache
from jspec.testing import scripted, tiny
from jspec.train.block_starts import fresh_dflash, with_markov, with_selector
from jspec.train.starts import fresh_eagle1, fresh_eagle3, fresh_mtp

MODEL = tiny.model(seed=3)
VOCAB = MODEL.target.config.vocab_size
# Ragged, with a one-token prompt and one that repeats itself.
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [5], [7, 8, 9, 7, 8]]
NEW = 24


def plain(prompts=PROMPTS, **kwargs):
    return jspec.generate(MODEL, None, prompts, max_new_tokens=NEW, **kwargs)


PLAIN = plain()
TEXT = [p + t for p, t in zip(PROMPTS, PLAIN.tokens, strict=True)]


def small(seed=3, gamma=3, **changes):
    return jspec.load_drafter(tiny.model(seed=seed, **changes), MODEL, gamma=gamma)


def padded(vocab_size):
    """A draft model whose head has another number of rows than the target's."""
    model = tiny.model(seed=3, vocab_size=vocab_size)
    drafter = drafters.small_model(model.target, VOCAB, gamma=3)
    return jspec.Draft(drafter, model.params, "padded", VOCAB)


def eagle_draft(head, grower):
    """A head that begins as the target's last layer, and so is sometimes right."""
    return jspec.Draft(eagle.drafter(head.design, grower), head.weights, "eagle", VOCAB)


def eagle3_head():
    ids = np.arange(0, VOCAB, 2, dtype=np.int32)  # half of the vocabulary
    return fresh_eagle3(MODEL, (0, 1, 2), ids, jax.random.key(1))


def parallel_draft(gamma):
    """An EAGLE-3 head with a mask token, which is right when EAGLE-3's first draft is."""
    head = eagle3_head()
    design = dataclasses.replace(head.design, mask_id=VOCAB - 1)
    width = head.weights.fc.shape[1]
    unknown = jax.random.normal(jax.random.key(6), (width,))
    weights = head.weights.replace(mask_hidden=unknown)
    return jspec.Draft(peagle.drafter(design, gamma), weights, "peagle", VOCAB)


def modules_draft(count, grower):
    """Modules that begin as the target's last layer, each with noise of its own."""
    every = [fresh_mtp(MODEL, jax.random.key(m)) for m in range(count)]
    weights = tuple(m.weights[0] for m in every)
    drafter = mtp.drafter(every[0].design, grower, count)
    return jspec.Draft(drafter, weights[0] if count == 1 else weights, "mtp", VOCAB)


def assistant_draft(gamma):
    """Layers that read the target's caches; random, and right now and then."""
    config = tiny.config(hidden=16, kv_heads=1, qk_norm=True, windows=(4, None))
    plain = transformer.init(config, jax.random.key(3), scale=0.3)
    layers = tuple(
        assistant.Layer(
            query=layer.qkv[0, :-2],
            out=layer.out,
            mlp=layer.mlp,
            attn_norm=layer.attn_norm,
            attn_post_norm=layer.attn_norm,
            mlp_norm=layer.mlp_norm,
            mlp_post_norm=layer.mlp_norm,
            q_norm=layer.q_norm,
            scale=jnp.ones(1),
        )
        for layer in plain.layers
    )
    wide = MODEL.config.hidden
    enter, leave = (
        jax.random.normal(jax.random.key(i), shape) / 8
        for i, shape in enumerate([(16, 2 * wide), (wide, 16)])
    )
    weights = assistant.Weights(
        MODEL.params.embed,
        enter,
        leave,
        layers,
        plain.final_norm,
        MODEL.params.head @ leave,
    )
    design = assistant.Design(config, (1, 1))
    return jspec.Draft(assistant.drafter(design, gamma), weights, "assistant", VOCAB)


STORE = store.build([text[3:14] for text in TEXT])  # so that not all is known
PAIRS = tree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
BUSHY = tree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 1, 0]])


FITTED = ("medusa", "blockwise", "hydra", "multi_token")  # right now and then


def heads(name, topology):
    weights = getattr(fitted, name)(MODEL, TEXT, topology.depth)
    drafter = getattr(drafters, name)(weights, VOCAB, topology)
    return jspec.Draft(drafter, weights, name, VOCAB)


def layer_heads(topology):
    layers = tiny.model(seed=8, layers=topology.depth).params.layers
    weights = fitted.multi_token(MODEL, TEXT, layers)
    drafter = drafters.multi_token(weights, MODEL.config, topology, chunk=3)
    return jspec.Draft(drafter, weights, "multi_token", VOCAB)


def blocks(head=lambda head, key: head, ids=None, **options):
    """A block-diffusion drafter that begins as the target's last layer."""
    k_fresh, k_own = jax.random.split(jax.random.key(2))
    fresh = fresh_dflash(MODEL, (0, 1), ids, VOCAB - 1, k_fresh, layers=1, block=5)
    return block_draft(shaken(head(fresh, k_own)), "dflash", MODEL, **options)


def shaken(head):
    """``head`` with noise where it begins without a view."""
    weights = head.weights
    own = weights.joint, weights.confidence, weights.convs
    leaves, form = jax.tree.flatten(own)
    keys = jax.random.split(jax.random.key(5), len(leaves) + 1)
    moved = [
        x + 0.3 * jax.random.normal(k, x.shape)
        for x, k in zip(leaves, keys, strict=False)
    ]
    joint, confidence, convs = jax.tree.unflatten(form, moved)
    weights = weights.replace(joint=joint, confidence=confidence, convs=convs)
    return dataclasses.replace(head, weights=weights)


def markov(link):
    return lambda head, key: with_markov(head, key, 4, link)


HALF = np.arange(0, VOCAB, 2, dtype=np.int32)
CASES = {
    "ngram": lambda: jspec.Draft(drafters.ngram(gamma=4, longest=3, shortest=1)),
    "ngram-first": lambda: jspec.Draft(
        drafters.ngram(gamma=3, longest=2, shortest=1, pick=drafters.first)
    ),
    "ngram-first-whole": lambda: jspec.Draft(
        drafters.ngram(gamma=2, longest=3, shortest=1, pick=drafters.first_whole)
    ),
    "small-same": small,
    "small-other": lambda: small(seed=4),
    "small-more-rows": lambda: padded(VOCAB + 3),
    "small-fewer-rows": lambda: padded(VOCAB - 5),
    "eagle1-tree": lambda: eagle_draft(
        fresh_eagle1(MODEL, jax.random.key(0)), growth.ranked(PAIRS)
    ),
    "eagle1-sampled-tree": lambda: eagle_draft(
        fresh_eagle1(MODEL, jax.random.key(0)), growth.sampled(PAIRS)
    ),
    "eagle3-dynamic": lambda: eagle_draft(
        eagle3_head(), growth.dynamic(7, 3, 3, least=0.02, widths=(1, 3))
    ),
    "eagle3-chain": lambda: eagle_draft(eagle3_head(), growth.chain(3)),
    "peagle": lambda: parallel_draft(3),
    "mtp-chain": lambda: modules_draft(1, growth.chain(3)),
    "mtp-modules": lambda: modules_draft(2, growth.chain(3)),
    "assistant": lambda: assistant_draft(3),
    "dflash": lambda: blocks(gamma=3),
    "dflash2": lambda: blocks(lambda h, key: with_selector(h, key, 4, count=5)),
    "dspark": lambda: blocks(markov(dspark.rnn), HALF, least=0.4),
    "medusa": lambda: heads("medusa", BUSHY),
    "blockwise": lambda: heads("blockwise", tree.line(3)),
    "hydra": lambda: heads("hydra", BUSHY),
    "multi-token": lambda: layer_heads(tree.expansion([2, 2])),
    "jacobi": lambda: jspec.Draft(drafters.jacobi(3), name="jacobi"),
    "lookahead": lambda: jspec.Draft(drafters.lookahead(3, 4, 2), name="lookahead"),
    "ngram-tree": lambda: jspec.Draft(drafters.ngram_tree(6, 3, shortest=1)),
    "recycling": lambda: jspec.Draft(
        drafters.recycling(VOCAB, PAIRS), name="recycling"
    ),
    "suffix-stored-tree": lambda: jspec.Draft(
        drafters.suffix(4, 8, drafters.suffix_tree, stored=True),
        STORE.on_device(),
        "suffix",
    ),
    "rest": lambda: jspec.Draft(drafters.rest(8, 4, shortest=1), STORE.on_device()),
    "self": lambda: drafters.self_model(MODEL, 1, 3),
    "fallback": lambda: drafters.fallback(
        jspec.Draft(drafters.ngram(4, 3, 1)),
        eagle_draft(eagle3_head(), growth.dynamic(7, 3, 3)),
    ),
    "fallback-small": lambda: drafters.fallback(
        jspec.Draft(drafters.ngram(5, 3, 1)), small()
    )._replace(name="behind"),
    "by-score": lambda: drafters.by_score(
        jspec.Draft(drafters.suffix(4), name="suffix"), heads("medusa", BUSHY), 1.0
    )._replace(name="suffix"),
    "adaptive-average": lambda: drafters.adaptive(
        jspec.Draft(drafters.ngram(5, 3, 1)), drafters.moving_average()
    )._replace(name="adaptive"),
    "confident": lambda: drafters.confident(small(seed=4), 0.3),
    "scripted-mixture": lambda: scripted.mixture(TEXT, 4, VOCAB),
}
# Their state is what the rounds were like, not only what was committed.
REMEMBER = (
    "scripted",
    "jacobi",
    "lookahead",
    "suffix",
    "recycling",
    "adaptive",
    "behind",
)


@pytest.fixture(params=CASES, scope="module")
def draft(request):
    return CASES[request.param]()


def start(draft, temperature=0.0):
    request = jspec.prepare(
        MODEL, draft, PROMPTS, max_new_tokens=NEW, temperature=temperature
    )
    return request, request.prefill()


def test_greedy_output_is_plain_greedy(draft):
    out = jspec.generate(MODEL, draft, PROMPTS, max_new_tokens=NEW)
    assert out.tokens == PLAIN.tokens
    assert out.finish_reason == PLAIN.finish_reason
    if draft.name in FITTED:
        assert 0 < out.stats.accepted < out.stats.proposed


def test_a_ragged_batch_equals_its_singles(draft):
    single = draft
    if draft.name == "scripted":  # its params are those of a batch
        single = draft._replace(params=jax.tree.map(lambda x: x[1:2], draft.params))
    options = dict(max_new_tokens=NEW, temperature=0.8)
    whole = jspec.generate(MODEL, draft, PROMPTS, seed=[7, 8, 9], **options)
    one = jspec.generate(MODEL, single, PROMPTS[1:2], seed=[8], **options)
    assert whole.tokens[1] == one.tokens[0]


def test_coupled_output_is_plain_sampling(draft):
    options = dict(max_new_tokens=NEW, temperature=0.8, seed=11)
    expected = plain(temperature=0.8, seed=11)
    out = jspec.generate(MODEL, draft, PROMPTS, rule=verify.coupled, **options)
    assert out.tokens == expected.tokens


def test_blocks_are_well_formed(draft):
    request, state = start(draft, temperature=1.0)
    context = jspec.state.context(state)
    keys, _ = jspec.sampling.row_keys(state.sampling, state.round)
    propose = jax.jit(draft.drafter.propose)
    block, _ = propose(draft.params, state.draft, keys, context)
    shape = draft.drafter.shape
    batch = len(PROMPTS)
    chex.assert_shape(
        [block.token, block.parent, block.live, block.vote], (batch, shape.nodes)
    )
    parent, live = np.asarray(block.parent), np.asarray(block.live)
    assert (parent[:, 0] == -1).all()
    assert (parent[:, 1:] < np.arange(1, shape.nodes)).all() and (
        parent[:, 1:] >= 0
    ).all()
    assert live[:, 0].all()
    for b in range(batch):
        assert all(live[b, parent[b, i]] for i in range(1, shape.nodes) if live[b, i])
    depth = tree.depth(tree.ancestors(block.parent))
    depth = jnp.where(block.vote, depth, 0)
    is_chain = shape.nodes == shape.depth + 1
    assert (
        int(depth.max()) == shape.depth if is_chain else int(depth.max()) <= shape.depth
    )
    assert ((block.token >= 0) & (block.token < VOCAB)).all()
    assert (np.asarray(block.token[:, 0]) == [p[-1] for p in PROMPTS]).all()
    assert (block.law.q is not None) == shape.dense
    if shape.dense:
        inner = np.unique(parent[parent >= 0])
        np.testing.assert_allclose(block.law.q[:, inner].sum(-1), 1.0, atol=1e-5)


def test_every_round_keeps_the_books_and_none_retraces(draft):
    """Counts are bounded and the cache is a fresh prefill of the committed tokens."""
    request, state = start(draft)
    shape = draft.drafter.shape
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def one_round(params, state):
        return decode.decode_round(
            params, state, target=MODEL.target, drafter=draft.drafter, rule=request.rule
        )

    for _ in range(6):
        before = state
        state, info = one_round(request.params, state)
        emitted = np.asarray(info.emitted)
        assert ((emitted >= 1) & (emitted <= np.asarray(info.proposed) + 1)).all()
        assert (np.asarray(info.proposed) <= shape.depth).all()
        assert (state.length == before.length + emitted).all()
        assert (state.cache.length == state.length - 1).all()
        for row, text in enumerate(TEXT):
            n = int(state.length[row])
            assert state.tokens[row, :n].tolist() == text[:n]
    _assert_cache(state)
    if draft.name not in REMEMBER:
        _assert_as_new(draft, state)


def _assert_as_new(draft, state):
    """The drafter's state is what it would make of the committed tokens as a prompt."""
    _, features = fill_cache(
        MODEL.target,
        MODEL.params,
        state.tokens,
        state.length,
        slots=state.cache.slots,
        taps=draft.drafter.shape.taps,
    )
    context = jspec.Context(state.tokens, state.length, state.sampling, features)
    fresh = draft.drafter.init(draft.params, context)
    jax.tree.map(_assert_close, _live(state.draft), _live(fresh))


def _assert_close(got, want):
    """Equal but for rounding, which grows with the values: hidden states reach 16."""
    scale = max(1.0, float(np.abs(want).max(initial=0)))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * scale)


def _live(state):
    """``state`` with zeros in the dead slots of its caches."""

    def clean(x):
        if not isinstance(x, KVCache):
            return x
        live = jnp.arange(x.slots) < x.length[:, None]
        return x.replace(
            k=[jnp.where(live[:, None, None, :], k, 0) for k in x.k],
            v=[jnp.where(live[:, None, :, None], v, 0) for v in x.v],
        )

    return jax.tree.map(clean, state, is_leaf=lambda x: isinstance(x, KVCache))


def _assert_cache(state):
    """The target's cache is a fresh prefill of the committed tokens."""
    cache = state.cache
    fresh, _ = fill_cache(
        MODEL.target, MODEL.params, state.tokens, state.length, slots=cache.slots
    )
    chex.assert_trees_all_close(_live(cache), _live(fresh), atol=1e-5)


def test_rounds_never_touch_the_host(draft):
    request, state = start(draft)
    rounds = jnp.int32(3)
    with jax.transfer_guard("disallow"):
        state = request.run(state, rounds)
    assert int(state.round.max()) == 3


def test_ended_rows_stay_as_they_are(draft):
    """A row that ended early is not disturbed by the rounds of the others."""
    request = jspec.prepare(MODEL, draft, PROMPTS, max_new_tokens=NEW)
    state = request.prefill()
    state = state.replace(limit=state.start + jnp.array([2, NEW, 5]))
    state = request.run(state, jnp.int32(100))
    assert (state.length - state.start).tolist() == [2, NEW, 5]
    for row, text in enumerate(TEXT):
        n = int(state.length[row])
        assert state.tokens[row, :n].tolist() == text[:n]
    _assert_cache(state)
