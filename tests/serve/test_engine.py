"""The engine: same tokens in any company, no leaked slot, no mixed answer."""

import functools
import operator
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec import drafters, verify
from jspec.drafters import growth
from jspec.prefill import Filled
from jspec.serve import adaptive, costs, prefixes, scheduler, slots
from jspec.serve.engine import Engine
from jspec.serve.request import Full
from jspec.state import RUNNING
from jspec.testing import tiny
from jspec.testing.tiny import byte_tokenizer
from jspec.train.starts import fresh_eagle3

MODEL = tiny.model(seed=3, tokenizer=byte_tokenizer(), vocab_size=257)
CONTEXT = 96
NEW = 20
# Lengths on both sides of the chunk of a prefill, and one token.
PROMPTS = [[7], [1, 2, 3] * 3, [5] * 40, list(range(30, 62)), [9, 8] * 16 + [9]]
# Temperature and seed of each; greedy and sampling requests share batches.
KNOBS = [(0.0, 0), (0.9, 5), (0.0, 1), (1.3, 2**40 + 1), (0.7, 3)]
SMALL = jspec.load_drafter(tiny.model(seed=4, vocab_size=257), MODEL, gamma=2)
NGRAM = jspec.Draft(drafters.ngram(gamma=3, longest=2, shortest=1), name="ngram")


def eagle():
    head = fresh_eagle3(MODEL, (0, 1, 2), np.arange(0, 257, 2), jax.random.key(1))
    drafter = drafters.eagle.drafter(head.design, growth.chain(2))
    return jspec.Draft(drafter, head.weights, "eagle", 257)


DRAFTS = {
    "ngram": NGRAM,
    "small": SMALL,
    "eagle": eagle(),
    "scheduled": scheduler.schedule(SMALL, costs.table({1: 1.0, 3: 1.2, 6: 3.0})),
}
SIZES = {"ngram": (2, 4), "small": (2, 4), "eagle": (2,), "scheduled": (2,)}


@functools.cache
def engine(name):
    """An engine that is used by all tests; none may disturb the next."""
    options = dict(sizes=SIZES[name], context=CONTEXT, log_prob=True)
    made = Engine(MODEL, DRAFTS[name], adaptive=False, **options)
    made.warm_up()
    return made


@pytest.fixture(scope="module")
def alone():
    """What ``generate`` makes of every prompt without any drafter."""
    return [
        jspec.generate(
            MODEL, None, [p], max_new_tokens=NEW, temperature=t, seed=[s], slots=CONTEXT
        ).tokens[0]
        for p, (t, s) in zip(PROMPTS, KNOBS, strict=True)
    ]


@pytest.fixture(scope="module", params=["ngram", "small"])
def running(request):
    return engine(request.param)


@pytest.fixture
def ngram():
    return engine("ngram")


class Compilations:
    """Counts what JAX traces and what XLA compiles."""

    EVENTS = ("jaxpr_trace_duration", "backend_compile_duration")

    def __init__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def _hear(self, name, seconds, **_):
        self.count += name.rpartition("/")[2] in self.EVENTS


COMPILATIONS = Compilations()


def submit(running, i, **options):
    temperature, seed = KNOBS[i]
    options = dict(max_new_tokens=NEW, temperature=temperature, seed=seed) | options
    return running.submit(PROMPTS[i], **options)


@pytest.mark.parametrize("order", [range(5), (4, 2, 0, 3, 1), (3,), (1, 1, 1)])
def test_a_requests_tokens_do_not_depend_on_its_company(running, alone, order):
    tickets = [submit(running, i) for i in order]
    for i, result in zip(order, running.run(tickets), strict=True):
        assert result.tokens == alone[i]
        assert result.finish_reason == "length"
        assert result.stats.new_tokens == NEW
    assert running.load == (0, 0)


def test_latecomers_and_requests_without_drafts_change_nothing(running, alone):
    first = submit(running, 2)
    for _ in range(3):
        running.step()
    late = [submit(running, i, speculate=i % 2 == 0) for i in (1, 4, 3, 0)]
    results = running.run([first, *late])
    assert [r.tokens for r in results] == [alone[i] for i in (2, 1, 4, 3, 0)]
    assert results[1].stats.proposed == results[3].stats.proposed == 0


def test_nothing_is_compiled_after_the_warm_up(running):
    before = COMPILATIONS.count
    assert before > 0  # it does count
    options = [
        {},
        {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "seed": 2},
        {"logit_bias": {3: -np.inf}, "presence_penalty": 1.0},
        {"forbidden_tokens": [1, 2], "min_new_tokens": 3, "stop": ["ab"]},
        {"max_new_tokens": 1},
        {"repetition_penalty": 1.2, "min_p": 0.1, "temperature": 0.5},
    ]
    tickets = [
        running.submit([1 + n] * length, **{"max_new_tokens": 9, **o})
        for n, (length, o) in enumerate(
            (length, o) for o in options for length in (1, 33, 70)
        )
    ]
    tickets += [running.submit([18] * n, max_new_tokens=5) for n in (40, 70, 71)]
    results = running.run(tickets)
    assert [r.shared for r in results[-3:]] == [39, 69, 69]  # of the prompt of 70
    assert COMPILATIONS.count == before


@pytest.mark.parametrize("name", ["small", "eagle", "scheduled"])
def test_adaptive_switching_keeps_the_tokens(name, alone, monkeypatch):
    """On and off in turn, however bad for speed."""
    made, turn = engine(name), iter(range(10**6))
    monkeypatch.setattr(made._governor, "always", False)
    monkeypatch.setattr(adaptive, "speculate", lambda *_: next(turn) % 3 == 0)
    before = COMPILATIONS.count
    tickets = [submit(made, i) for i in range(5)]
    results = made.run(tickets)
    assert [r.tokens for r in results] == alone
    assert COMPILATIONS.count == before
    assert 0 < sum(r.stats.drafted_rounds for r in results)
    assert any(r.stats.drafted_rounds < r.stats.rounds for r in results)


def test_a_prefill_may_come_from_elsewhere(ngram, alone):
    prepared = ngram.prepare(PROMPTS[1], max_new_tokens=NEW, temperature=0.9, seed=5)
    one = prepared.row.prefill()
    leaves, tree = jax.tree.flatten(one.replace(sampling=None))
    sent = [np.asarray(x) for x in leaves]  # as over a wire
    given = jax.tree.unflatten(tree, [jnp.asarray(x) for x in sent])
    given = given.replace(sampling=one.sampling)
    ticket = ngram.submit(prepared, prefilled=given)
    assert ngram.run([ticket])[0].tokens == alone[1]


SYSTEM = [217, 250, 3, 99, 41, 8] * 9
ALIKE = [SYSTEM + tail for tail in ([1, 2, 1, 2], [5], [1, 2, 9] * 7, [1, 2, 1, 2])]


@pytest.mark.parametrize("name", ["ngram", "small", "eagle"])
def test_prompts_that_begin_alike_are_read_once(name):
    """A drafter may read tokens, have a cache of its own, or tap features."""
    made, options = engine(name), dict(max_new_tokens=12, temperature=0.9, seed=3)
    got = made.run([made.submit(p, **options) for p in ALIKE])
    assert [r.shared for r in got] == [0, 54, 56, 57]
    for prompt, result in zip(ALIKE, got, strict=True):
        alone = jspec.generate(MODEL, None, [prompt], slots=CONTEXT, **options)
        assert result.tokens == alone.tokens[0]


def test_a_row_from_a_prefix_is_the_row_from_its_prompt():
    made = engine("eagle")
    _, left = made.programs.prefill(made.prepare(ALIKE[2]))
    prepared = made.prepare(ALIKE[0])
    got, _ = made.programs.prefill(prepared, left, 56)
    want = prepared.row.prefill()
    live = np.arange(len(ALIKE[0]) - 1)
    for cache in ("cache", "draft.inner.cache"):
        ours, theirs = (operator.attrgetter(cache)(s) for s in (got, want))
        assert ours.length == theirs.length == len(live)
        for a, b in zip(ours.v, theirs.v, strict=True):
            np.testing.assert_allclose(a[:, :, live], b[:, :, live], atol=1e-5)
    got_out, want_out = got.draft.inner.out, want.draft.inner.out
    np.testing.assert_allclose(got_out, want_out, atol=1e-6 * np.abs(want_out).max())
    np.testing.assert_array_equal(got.tokens, want.tokens)


def test_what_is_known_of_prompts_is_bounded_and_the_latest():
    def entry(*prompt):
        return prefixes.Entry(np.array(prompt), Filled(None, None))

    a, b, c = entry(1, 2, 3), entry(1, 2, 9, 9), entry(7, 7)
    known = prefixes.remember((), a, None, 2)
    assert prefixes.longest(known, [1, 2, 9, 9]) == (2, a)
    assert prefixes.longest(known, [1, 2]) == (1, a)
    assert prefixes.longest(known, [4]) == prefixes.longest(known, [4, 5]) == (0, None)
    known = prefixes.remember(known, b, a, 2)
    assert known == (b,)  # it has all that is known of a
    known = prefixes.remember(known, c, None, 2)
    known = prefixes.remember(known, a, b, 2)
    assert known == (a, b)
    assert prefixes.remember(known, c, None, 0) == ()


def test_pieces_join_to_the_text_and_stops_cut_everything(ngram):
    plain = jspec.generate(MODEL, None, [PROMPTS[2]], max_new_tokens=40, log_prob=True)
    text = plain.text[0]
    stop = text[len(text) // 2 :][:2]
    pieces = []
    ticket = ngram.submit(
        PROMPTS[2], max_new_tokens=40, stop=[stop], sink=pieces.append
    )
    result = ngram.run([ticket])[0]
    assert result.text == text[: text.index(stop)] == "".join(p.text for p in pieces)
    assert result.finish_reason == "stop" == pieces[-1].finish_reason
    assert result.tokens == plain.tokens[0][: len(result.tokens)]
    assert [t for p in pieces for t in p.tokens] == result.tokens
    assert len(result.log_prob) == len(result.tokens) == result.stats.new_tokens
    np.testing.assert_allclose(
        result.log_prob, plain.log_prob[0][: len(result.tokens)], atol=1e-4
    )


def test_an_end_of_sequence_ends_a_request(alone):
    eos = alone[0][4]
    made = Engine(
        MODEL, NGRAM, eos_ids=(eos,), sizes=1, context=CONTEXT, rule=verify.greedy
    )
    result = made.run([submit(made, 0)])[0]
    assert result.tokens == alone[0][: alone[0].index(eos) + 1]
    assert result.finish_reason == "eos"


def test_the_queue_is_bounded(ngram, monkeypatch):
    monkeypatch.setattr(ngram._waiting, "most", 8)
    tickets = [ngram.submit([1, 2], max_new_tokens=2) for _ in range(8)]
    with pytest.raises(Full, match="8 requests are waiting"):
        ngram.submit([1, 2], max_new_tokens=2)
    assert {len(r.tokens) for r in ngram.run(tickets)} == {2}


def test_cancels_and_deadlines_free_their_slots(ngram, alone):
    gone = [submit(ngram, i, max_new_tokens=60) for i in (0, 2)]
    slow = submit(ngram, 4, max_new_tokens=60, seconds=1e-9)
    ngram.step()
    ngram.step()
    for ticket in gone:
        ticket.cancel()
    rest = submit(ngram, 2)
    results = ngram.run([*gone, slow, rest])
    reasons = [r.finish_reason for r in results]
    assert reasons == ["cancelled", "cancelled", "deadline", "length"]
    assert results[3].tokens == alone[2]
    assert ngram.load == (0, 0)


def test_random_traffic_leaks_no_slot_and_mixes_no_answers(ngram, alone, monkeypatch):
    """Cancels at any time, budgets of one token, a queue that is full at times."""
    monkeypatch.setattr(ngram._waiting, "most", 8)
    chance, live, checked = random.Random(0), [], 0
    for _ in range(400):
        for _ in range(chance.choice((0, 0, 1, 2))):
            i, new = chance.randrange(5), chance.choice((1, 5, NEW))
            try:
                live.append((i, new, submit(ngram, i, max_new_tokens=new)))
            except Full:
                live[chance.randrange(len(live))][2].cancel()
        if live and chance.random() < 0.2:
            live[chance.randrange(len(live))][2].cancel()
        ngram.step()
    ngram.run([t for *_, t in live])
    for i, new, ticket in live:
        result = ticket.result()
        assert result.tokens == alone[i][: len(result.tokens)]
        if result.finish_reason == "length":
            assert len(result.tokens) == new
            checked += 1
        else:
            assert result.finish_reason == "cancelled"
    assert len(live) > 150 and checked > 60
    assert ngram.load == (0, 0)
    assert not np.any(np.asarray(ngram._state.reason) == RUNNING)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -1.0}, "temperature"),
        ({"forbidden_tokens": list(range(20))}, "room for 8"),
        ({"stop": [""]}, "stop string is empty"),
        ({"seconds": 0.0}, "a deadline must lie ahead"),
        ({"colour": "red"}, "unknown sampling option 'colour'"),
    ],
)
def test_bad_requests_are_refused_before_they_queue(ngram, options, message):
    with pytest.raises(ValueError, match=message):
        ngram.submit([1, 2, 3], **options)
    assert ngram.load == (0, 0)


def test_bad_engines_are_refused():
    with pytest.raises(ValueError, match="ascending"):
        Engine(MODEL, sizes=(4, 2))
    with pytest.raises(ValueError, match="temperature is 0.5.*greedy"):
        cold = Engine(MODEL, sizes=1, context=64, rule=verify.greedy)
        cold.prepare([1], temperature=0.5)
    with pytest.raises(ValueError, match="records none"):
        Engine(MODEL, sizes=1, context=64).prepare([1], log_prob=True)
    with pytest.raises(ValueError, match="has 96 tokens"):
        Engine(MODEL, sizes=1, context=96).prepare([1] * 96)


def test_rows_are_found_whatever_the_state(ngram):
    leaves = jax.tree.leaves(ngram._state)
    sizes = {
        x.shape[axis]
        for x, axis in zip(leaves, ngram.programs.axes, strict=True)
        if axis >= 0
    }
    assert sizes == {len(ngram._owner)}
    assert sum(axis < 0 for axis in ngram.programs.axes) == 1  # ids that end a row


def test_resizing_keeps_rows_and_ends_the_others(ngram):
    prepared = ngram.prepare(PROMPTS[1], max_new_tokens=NEW)
    state = ngram.programs.spread(prepared.row.prefill(), 4)
    state = state.replace(length=jnp.arange(4) + 1)
    got = ngram.programs.resize(state, [3], 2)
    assert got.length.tolist() == [4, 1]
    assert got.reason.tolist()[0] == RUNNING != got.reason.tolist()[1]
    assert slots.rows([3], 2)[0].tolist() == [3, 0]
