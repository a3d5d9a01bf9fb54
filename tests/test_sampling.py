"""Laws and draws against plain numpy, exact breakpoints and simple properties."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec import sampling as smp
from jspec.tree import ancestors
from jspec.types import Block

LAST = np.nextafter(np.float32(1), np.float32(0))
INF = np.inf


def make(batch=1, vocab=12, eos_ids=(2,), **kwargs):
    return smp.options(batch, vocab_size=vocab, eos_ids=eos_ids, **kwargs)


def normal(seed, shape, scale=2.0):
    return np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32)


def softmax(z):
    e = np.exp(z - np.max(z, -1, keepdims=True))
    return e / np.sum(e, -1, keepdims=True)


def block_of(token, parent):
    """A block and its mask from ``[B, N]`` arrays."""
    token, parent = np.asarray(token, np.int32), np.asarray(parent, np.int32)
    parent = np.broadcast_to(parent, token.shape)
    on = np.ones(token.shape, bool)
    return Block(token, parent, on, on), ancestors(jnp.asarray(parent))


# Draws

draws = jax.jit(jax.vmap(smp.draw, (0, None)))


def breakpoints(p):
    """For every id the least float32 ``u`` in [0, 1] whose draw is at or above it."""
    ids = np.arange(len(p))
    low = np.zeros(len(p), np.int32)
    high = np.full(len(p), np.float32(1).view(np.int32))
    for _ in range(31):
        middle = (low + high) // 2
        reached = np.asarray(draws(middle.view(np.float32), p)) >= ids
        low, high = np.where(reached, low, middle + 1), np.where(reached, middle, high)
        high = high.astype(np.int32)
        low = np.minimum(low, high).astype(np.int32)
    return high.view(np.float32)


@pytest.mark.parametrize("vocab", [1, 2, 7, 256, 257, 1000])
@pytest.mark.parametrize("sharpness", [0.0, 1.0, 4.0])
def test_draw_has_the_law_within_1e_6(vocab, sharpness):
    p = softmax(normal(vocab, vocab, sharpness).astype(np.float64))
    p[np.random.default_rng(1).random(vocab) < 0.3] = 0
    p[vocab // 2] += 0.1
    p /= p.sum()
    edge = np.append(breakpoints(jnp.asarray(3 * p, jnp.float32)), 1.0)
    np.testing.assert_allclose(np.diff(edge), p, rtol=0, atol=1e-6)


def test_draw_of_ten_thousand_ids_passes_chi_square():
    p = softmax(normal(0, 10_000, 1.0))
    count = np.zeros(10_000)
    for key in jax.random.split(jax.random.key(0), 10):
        u = jax.random.uniform(key, (20_000,))
        count += np.bincount(draws(u, p), minlength=10_000)
    expected = 200_000 * p.reshape(100, 100).sum(1)
    chi2 = np.sum((count.reshape(100, 100).sum(1) - expected) ** 2 / expected)
    assert chi2 < 149  # 99 degrees of freedom: 1 in 1000


def test_bfloat16_logits_are_cast_up_before_the_law():
    z = jnp.zeros((1, 10_000), jnp.bfloat16)
    q = smp.draft_law(z, make(vocab=10_000, temperature=1.0))
    assert q.dtype == jnp.float32
    u = jax.random.uniform(jax.random.key(1), (20_000,))
    count = np.bincount(np.asarray(draws(u, q[0])) // 1000, minlength=10)
    assert np.sum((count - 2000) ** 2 / 2000) < 27.9  # 9 degrees of freedom: 1 in 1000


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.sampled_from([0.0, 1e-38, 1e-9, 1e-4, 0.3, 1.0]), min_size=3),
    st.floats(0, float(LAST), width=32),
)
def test_draw_never_returns_an_id_without_mass(weights, u):
    p = np.zeros(600, np.float32)
    p[np.arange(len(weights)) * 7 % 600] = weights
    if p.max() < 1e-20:
        p[300] = 1
    u = np.asarray([0, u, 0.5, LAST, 1.0], np.float32)
    assert np.all(p[np.asarray(draws(u, p))] > 0)


@pytest.mark.parametrize("bad", [0.0, np.nan])
def test_draw_of_a_degenerate_row_stays_in_the_vocabulary(bad):
    for vocab in (5, 300):
        p = np.full(vocab, bad, np.float32)
        ids = np.asarray(draws(np.asarray([0, 0.5, LAST], np.float32), p))
        assert np.all((ids >= 0) & (ids < vocab))
    p[3] = 1.0
    assert int(smp.draw(jnp.float32(0.5), jnp.asarray(p))) == 3


@pytest.mark.parametrize("vocab", [1, 5, 256, 300, 1024])
def test_argmax_is_the_first_maximum_and_finds_a_nan(vocab):
    z = np.round(normal(0, (3, 4, vocab)))
    z[0, 0] = -INF
    z[0, 1, vocab // 2] = INF
    z[1, 2, vocab // 3 :] = np.nan
    found = jax.jit(smp.argmax)(z)
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, jnp.argmax(z, -1))
    assert np.isnan(z[1, 2, found[1, 2]])


# Text-dependent logits


def reference_process(z, o, prompt, output, drafted):
    """One row ``[V]`` of logits after everything, given its whole history as lists."""
    z = z.astype(np.float64)
    for token, value in o.get("logit_bias", {}).items():
        z[token] += value
    for token in set(prompt + output + drafted):
        r = o.get("repetition_penalty", 1.0)
        z[token] = z[token] * r if z[token] < 0 else z[token] / r
    new = output + drafted
    for token in set(new):
        z[token] -= o.get("presence_penalty", 0.0)
        z[token] -= o.get("frequency_penalty", 0.0) * new.count(token)
    z[list(o.get("forbidden_tokens", []))] = -INF
    if len(new) < o.get("min_new_tokens", 0):
        z[2] = -INF
    if len(new) in o.get("forced_tokens", {}):
        forced = o["forced_tokens"][len(new)]
        z = np.where(np.arange(len(z)) == forced, 0.0, -INF)
    return z


SETTINGS = {
    "none": {},
    "bias": {"logit_bias": {1: 2.5, 5: -INF, 7: -1.0}},
    "repetition": {"repetition_penalty": 1.3},
    "reward": {"repetition_penalty": 0.7},
    "presence": {"presence_penalty": 0.6},
    "frequency": {"frequency_penalty": -0.4},
    "forbidden": {"forbidden_tokens": [0, 11]},
    "minimum": {"min_new_tokens": 5},
    "forced": {"forced_tokens": {4: 9, 5: 2}},
    "all": {
        "logit_bias": {1: 2.5, 5: -INF},
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "forbidden_tokens": [0],
        "min_new_tokens": 5,
        "forced_tokens": {6: 1},
    },
}
CHAIN = [-1, 0, 1, 2, 3]
TREE = [-1, 0, 0, 1, 1, 3, 2]
process = jax.jit(smp.process)
target_law = jax.jit(smp.target_law)
LIST_OPTIONS = ("logit_bias", "forbidden_tokens", "forced_tokens")
FILL = {"repetition_penalty": 1.0}


def check_process(rows, parent, seed):
    """Compares ``process`` with a loop over nodes; ``rows`` has options for each row."""
    rng = np.random.default_rng(seed)
    batch, nodes, vocab = len(rows), len(parent), 12
    start, length = rng.integers(1, 5, batch), rng.integers(6, 9, batch)
    tokens = rng.integers(0, vocab, (batch, 16)).astype(np.int32)
    tokens[np.arange(16) >= length[:, None]] = 10**6  # undefined slots
    drafted = rng.integers(0, vocab, (batch, nodes))
    drafted[:, 0] = tokens[np.arange(batch), length - 1]
    block, mask = block_of(drafted, parent)
    z = normal(seed, (batch, nodes, vocab))
    names = {name for row in rows for name in row}
    kwargs = {
        n: [row.get(n, None if n in LIST_OPTIONS else FILL.get(n, 0)) for row in rows]
        for n in names
    }
    o = make(batch, vocab, **kwargs)
    got = process(z, o, tokens, length, start, block, mask)
    assert got.dtype == jnp.float32
    for b in range(batch):
        text = tokens[b, : length[b]].tolist()
        for i in range(nodes):
            path = [int(drafted[b, j]) for j in range(1, nodes) if mask[b, i, j]]
            prompt, output = text[: start[b]], text[start[b] :]
            want = reference_process(z[b, i].copy(), rows[b], prompt, output, path)
            np.testing.assert_allclose(got[b, i], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("parent", [CHAIN, TREE, [-1]], ids=["chain", "tree", "root"])
@pytest.mark.parametrize("name", SETTINGS)
def test_process_equals_a_loop_over_nodes(name, parent):
    check_process([SETTINGS[name]], parent, seed=3)


def test_process_of_a_mixed_batch():
    check_process(list(SETTINGS.values()), TREE, seed=4)


@settings(deadline=None, max_examples=20)
@given(st.data())
def test_process_of_any_tree(data):
    parent = [-1] + [data.draw(st.integers(0, i)) for i in range(5)]
    rows = [SETTINGS[data.draw(st.sampled_from(sorted(SETTINGS)))] for _ in range(3)]
    check_process(rows, parent, seed=data.draw(st.integers(0, 99)))


def test_process_casts_up_and_changes_nothing_when_nothing_is_asked():
    z = jnp.asarray(normal(0, (1, 1, 12)), jnp.bfloat16)
    block, mask = block_of([[3]], [[-1]])
    tokens = np.zeros((1, 4), np.int32)
    got = process(z, make(), tokens, np.array([2]), np.array([1]), block, mask)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, z.astype(jnp.float32))


def test_a_fault_shows_in_the_raw_logit_of_the_best_token():
    z = normal(0, (1, 4, 3000))
    z[0, 0, 1400], z[0, 1], z[0, 2, 2999] = np.nan, -INF, INF
    law = target_law(z, make(vocab=3000, temperature=0.5, top_p=0.9))
    top = np.take_along_axis(z, np.asarray(law.best)[..., None], -1)[0, :, 0]
    np.testing.assert_array_equal(np.isfinite(top), [False, False, False, True])
    np.testing.assert_array_equal(np.isfinite(law.p[0, :, 0]), np.isfinite(top))


# Laws


def reference_law(z, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """transformers' warpers in float64; of tied values the higher ids stay."""
    z = (z / np.float32(temperature)).astype(np.float64)
    if top_k:
        z[z < np.sort(z)[-min(top_k, len(z))]] = -INF
    if top_p < 1:
        order = np.argsort(z, kind="stable")
        drop = order[np.cumsum(softmax(z)[order]) <= 1 - top_p]
        z[drop[drop != order[-1]]] = -INF
    p = softmax(z)
    z[p < min_p * p.max()] = -INF
    return softmax(z)


CUTS = [
    {},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 3000},
    {"top_k": 10**9},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_p": 1e-6},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8},
    {"top_k": 2500, "top_p": 0.97, "min_p": 0.01},
]


def spread(vocab):
    """Rows that are sharp, medium and flat, and the first two of them with ties."""
    z = normal(5, (5, vocab), 1.0) * np.asarray([6, 3, 0.3, 3, 1])[:, None]
    z[3:] = np.round(z[3:] * 4) / 4
    return z.astype(np.float32)


@pytest.mark.parametrize("vocab", [12, 1000, 20_000])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_target_law_truncates_as_transformers_does(cut, vocab):
    z = spread(vocab)
    o = make(vocab=vocab, temperature=0.8, **cut)
    law = target_law(z[None], o)
    np.testing.assert_array_equal(law.best[0], np.argmax(z, -1))
    for row, p in zip(z, law.p[0], strict=True):
        want = reference_law(row, 0.8, **cut)
        np.testing.assert_array_equal(p > 0, want.astype(np.float32) > 0)
        np.testing.assert_allclose(p, want, rtol=2e-5, atol=1e-7)


def test_top_p_at_an_exact_boundary_keeps_the_crossing_token_only():
    z = jnp.log(jnp.asarray([[[0.25, 0.5, 0.25], [0.125, 0.625, 0.25]]]))
    p = target_law(z, make(vocab=3, temperature=1.0, top_p=0.75)).p[0]
    np.testing.assert_allclose(p, [[0, 2 / 3, 1 / 3], [0, 5 / 7, 2 / 7]], rtol=1e-6)


def test_rows_of_a_mixed_batch_equal_their_singles_bit_for_bit():
    vocab = 3000
    z = spread(vocab)[:, None]
    rows = [
        {"temperature": 0.0, "top_p": 0.5},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.0, "top_p": 0.95},
        {"temperature": 1.3, "top_k": 7},
        {"temperature": 1.0, "min_p": 0.1},
    ]
    names = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    mixed = {n: [row.get(n, off) for row in rows] for n, off in names.items()}
    together = target_law(z, make(5, vocab, **mixed))
    for i, row in enumerate(rows):
        alone = target_law(z[i : i + 1], make(1, vocab, **row))
        np.testing.assert_array_equal(together.p[i], alone.p[0])


@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1e-6])
def test_no_temperature_and_hardly_any_are_greedy(temperature):
    z = normal(2, (1, 4, 50))
    law = target_law(z, make(vocab=50, temperature=temperature, top_k=3, top_p=0.9))
    np.testing.assert_array_equal(law.p[0], np.eye(50)[np.argmax(z[0], -1)])


def test_draft_law_is_the_target_law_of_one_row():
    z = normal(3, (2, 40))
    o = make(2, 40, temperature=[0.0, 0.9], top_k=4)
    law = smp.target_law(z[:, None], o)
    np.testing.assert_array_equal(smp.draft_law(jnp.asarray(z), o), law.p[:, 0])


def test_padding_of_the_vocabulary_never_wins():
    z = mask = normal(0, (1, 2, 16))
    z[..., 12:] = 100.0
    assert smp.mask_padding(mask, 16) is mask
    z = smp.mask_padding(jnp.asarray(z), 12)
    for temperature in (0.0, 5.0):
        law = target_law(z, make(vocab=12, temperature=temperature))
        assert np.all(law.best < 12)
        assert np.all(law.p[..., 12:] == 0)
        ids = draws(np.asarray([0, 0.99, LAST], np.float32), law.p[0, 0])
        assert np.all(np.asarray(ids) < 12)


def test_log_prob_is_the_log_softmax():
    z = jnp.asarray(normal(0, (2, 3, 40)), jnp.bfloat16)
    token = np.arange(6).reshape(2, 3)
    want = jax.nn.log_softmax(z.astype(jnp.float32))
    want = np.take_along_axis(np.asarray(want), token[..., None], -1)[..., 0]
    np.testing.assert_allclose(smp.log_prob(z, token), want, rtol=1e-5)


def test_no_value_of_an_option_retraces():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def law(z, o, tokens, length, start, block, mask):
        return smp.law(z, o, tokens, length, start, block, mask)

    z = normal(0, (1, 7, 12))
    block, mask = block_of(np.ones((1, 7)), TREE)
    args = np.zeros((1, 9), np.int32), np.array([5]), np.array([2]), block, mask
    for o in [*SETTINGS.values(), *CUTS]:
        law(z, make(temperature=0.5, seed=len(o), **o), *args)
    law(z, make(), *args)


# Randomness


def test_noise_has_its_shapes_and_ranges():
    o = make(3, temperature=1.0)
    _, judge = smp.row_keys(o, jnp.arange(3))
    noise = jax.jit(smp.noise, static_argnums=(3, 4, 5))(
        judge, o, jnp.asarray([5, 6, 7]), 9, 4, 300
    )
    assert noise.accept.shape == (3, 9)
    assert noise.next.shape == (3,)
    assert noise.race.shape == (3, 4, 300)
    for u in (noise.accept, noise.next):
        assert np.all((u >= 0) & (u < 1))
    assert noise.race.dtype == jnp.float32
    assert np.all((noise.race > 0) & np.isfinite(noise.race))


def test_a_race_depends_on_seed_and_position_only():
    o = make(2, seed=[4, 9])
    race = smp.race(o, jnp.asarray([5, 7]), 4, 50)
    other = smp.race(make(1, seed=9, temperature=2.0), jnp.asarray([8]), 2, 50)
    np.testing.assert_array_equal(race[1, 1:3], other[0])
    flat = np.asarray(race).reshape(8, 50)
    assert len({row.tobytes() for row in flat}) == 8


def test_a_race_draws_the_law():
    p = np.asarray([0.5, 0.0, 0.3, 0.2], np.float32)
    race = smp.race(make(1, seed=3), jnp.asarray([0]), 40_000, 4)[0]
    count = np.bincount(jnp.argmin(race / p, -1), minlength=4)
    expected = 40_000 * p
    assert count[1] == 0
    chi2 = np.sum((count - expected)[p > 0] ** 2 / expected[p > 0])
    assert chi2 < 13.8  # 2 degrees of freedom: 1 in 1000
    assert abs(float(race.mean()) - 1) < 0.01
    assert abs(float(race.var()) - 1) < 0.03


def test_no_two_streams_share_a_key():
    o = make(2, seed=0)
    keys = [*smp.row_keys(o, jnp.zeros(2, int)), *smp.row_keys(o, jnp.ones(2, int))]
    data = np.concatenate([jax.random.key_data(k) for k in [o.key, *keys]])
    assert len({row.tobytes() for row in data}) == 10
    draft, judge = smp.row_keys(o, jnp.zeros(2, int))
    u = jax.vmap(lambda k: jax.random.uniform(k, (9,)))(draft)
    noise = smp.noise(judge, o, jnp.ones(2, int), 9, 1, 9)
    assert not np.intersect1d(u, noise.accept).size
    assert not np.intersect1d(noise.next, noise.accept).size


def test_seeds():
    def data(o):
        return jax.random.key_data(o.key)

    one = data(make(3, seed=7))
    assert len({row.tobytes() for row in np.asarray(one)}) == 3
    np.testing.assert_array_equal(one[:1], data(make(1, seed=[7])))
    listed = data(make(3, seed=[5, 7, 7]))
    np.testing.assert_array_equal(listed[1:2], one[:1])
    np.testing.assert_array_equal(listed[1], listed[2])
    big = data(make(3, seed=[0, 2**32, 2**64 - 1]))
    assert len({row.tobytes() for row in np.asarray(big)}) == 3


# Options


def test_options_lay_out_rows_and_pad_lists():
    o = make(
        2,
        top_k=np.asarray([3, 10**12]),
        temperature=(0.5, None),
        logit_bias=[{3: 1.5}, None],
        forbidden_tokens=range(9),
        forced_tokens={0: 10},
    )
    np.testing.assert_array_equal(o.top_k, [3, 12])
    np.testing.assert_array_equal(o.temperature, [0.5, 0.0])
    assert o.bias_id.shape == o.bias_value.shape == o.forced_at.shape == (2, 8)
    assert o.forbidden.shape == (2, 16)
    np.testing.assert_array_equal(o.bias_id[:, :2], [[3, -1], [-1, -1]])
    np.testing.assert_array_equal(o.eos, [2] + [-1] * 7)


MISTAKES = [
    ({"temprature": 1.0}, r"'temprature'; did you mean 'temperature'\? known.*top_k"),
    ({"zzz": 1}, r"unknown sampling option 'zzz'; known options"),
    ({"temperature": -1.0}, r"temperature = -1.0 is outside \[0, inf\)"),
    ({"temperature": float("nan")}, r"temperature = nan is outside"),
    ({"temperature": [1.0, INF]}, r"temperature = inf in row 1 is outside"),
    ({"temperature": "hot"}, r"temperature = 'hot' must be a number"),
    ({"top_p": 0.0}, r"top_p = 0.0 is outside \(0, 1\]; 1 turns it off"),
    ({"top_p": [0.5, 1.5]}, r"top_p = 1.5 in row 1 is outside"),
    ({"top_k": -1}, r"top_k = -1 is outside \[0, inf\); 0 turns it off"),
    ({"top_k": 2.5}, r"top_k = 2.5 must be an integer"),
    ({"top_k": True}, r"top_k = True must be an integer"),
    ({"min_p": 1.5}, r"min_p = 1.5 is outside \[0, 1\]"),
    ({"repetition_penalty": 0}, r"repetition_penalty = 0 is outside \(0, inf\)"),
    ({"presence_penalty": INF}, r"presence_penalty = inf is outside"),
    ({"frequency_penalty": 10**400}, r"frequency_penalty = 1000.* must be a number"),
    ({"min_new_tokens": -3}, r"min_new_tokens = -3 is outside"),
    ({"seed": -1}, r"seed = -1 is outside \[0, 2\*\*64\)"),
    ({"seed": [1, 2, 3]}, r"seed is a list of 3 but the batch has 2 sequences"),
    ({"top_k": []}, r"top_k is a list of 0 but the batch has 2"),
    ({"logit_bias": [{}]}, r"logit_bias is a list of 1 but the batch has 2"),
    ({"logit_bias": {12: 1.0}}, r"logit_bias has id 12 in row 0.*\[0, 12\)"),
    ({"logit_bias": {1: np.nan}}, r"logit_bias has value nan in row 0; .*-inf"),
    ({"logit_bias": {1: INF}}, r"logit_bias has value inf in row 0"),
    ({"logit_bias": [1, 2]}, r"logit_bias = \[1, 2\] in row 0 must be a dict"),
    ({"forbidden_tokens": [[0], [-1]]}, r"forbidden_tokens has id -1 in row 1"),
    ({"forbidden_tokens": 3}, r"forbidden_tokens = 3 in row 0 must be a list of ids"),
    ({"forbidden_tokens": "ab"}, r"forbidden_tokens = 'ab' in row 0 must be a list"),
    ({"forbidden_tokens": [{1: 2}, None]}, r"= \{1: 2\} in row 0 must be a list"),
    ({"forced_tokens": {-1: 3}}, r"forced_tokens has position -1 in row 0"),
    ({"forced_tokens": {0: 99}}, r"forced_tokens has id 99 in row 0"),
    (
        {"forced_tokens": [{}, {0: 3}], "forbidden_tokens": [3]},
        r"row 1 both forces and forbids token 3; remove it",
    ),
    (
        {"forced_tokens": {0: 3}, "logit_bias": {3: -INF}},
        r"row 0 both forces and forbids token 3",
    ),
    ({"forbidden_tokens": list(range(12))}, r"row 0 forbids all 12 tokens; leave one"),
    (
        {"forbidden_tokens": [i for i in range(12) if i != 2], "min_new_tokens": 1},
        r"row 0 forbids all 12 tokens",
    ),
    ({"eos_ids": (12,)}, r"eos_ids has id 12; ids are integers in \[0, 12\)"),
    ({"batch": 0}, r"batch = 0; it must be at least 1"),
]


@pytest.mark.parametrize("kwargs, message", MISTAKES, ids=lambda x: str(x)[:40])
def test_mistakes_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        make(**{"batch": 2, **kwargs})
