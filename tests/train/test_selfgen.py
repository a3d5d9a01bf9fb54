"""Conversations that a target writes itself, against one written token by token."""

import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chats import EOS, chat_tokenizer

import jspec
from jspec import sampling as smp
from jspec.testing import tiny
from jspec.train import corpus, metrics
from jspec.train.selfgen import selfgen
from jspec.train.template import template, user_tokens
from jspec.types import chain

TOKENIZER = chat_tokenizer()
FORM = template(TOKENIZER)
ENDS = (EOS, *range(100, 112))  # many, or a random model would never end a turn
MODEL = tiny.model(
    seed=3, tokenizer=TOKENIZER, vocab_size=258, eos_ids=ENDS, max_position=128
)
SMALL = {"user_cap": 9, "answer_cap": 12}
TEMPERATURES = (0.0, 0.7, 1.3)
PLAN = {**SMALL, "temperatures": TEMPERATURES, "answer_top_k": 20, "user_top_p": 0.8}


@jax.jit
def next_logits(tokens, at):
    cache = MODEL.target.init_cache(1, 1, jnp.float32)
    return MODEL.target.score(MODEL.params, cache, chain(tokens)).logits[0, at]


def law(logits, temperature, top_k=0, top_p=1.0):
    """Temperature, then the best ``top_k``, or the fewest with ``top_p``, by sorting."""
    if temperature == 0:
        return np.eye(len(logits))[logits.argmax()]
    p = np.exp((logits - logits.max()) / temperature)
    p /= p.sum()
    best = np.argsort(-p)
    keep = top_k or int(np.searchsorted(np.cumsum(p[best]), top_p)) + 1
    out = np.zeros_like(p)
    out[best[:keep]] = p[best[:keep]]
    return out / out.sum()


def converse(seed, number):
    """``(user, answer, temperature)`` of one conversation, every token from scratch."""
    key = smp.options(1, vocab_size=258, seed=[seed]).key[0]
    k_temperature, k_token = jax.random.split(jax.random.fold_in(key, number))
    temperature = float(jax.random.choice(k_temperature, jnp.array(TEMPERATURES)))
    user, answer = [], []

    def draw(said, **options):
        tokens = [*FORM.prefix, *said]
        padded = np.zeros((1, 100), np.int32)
        padded[0, : len(tokens)] = tokens
        logits = np.asarray(next_logits(padded, len(tokens) - 1), np.float64)
        u = jax.random.uniform(jax.random.fold_in(k_token, len(said)))
        return int(smp.draw(u, jnp.asarray(law(logits, **options), jnp.float32)))

    while not user or user[-1] != FORM.turn[0]:
        token = draw(user, temperature=1.0, top_p=0.8)
        is_over = len(user) == 9 or token in ENDS
        user.append(FORM.turn[0] if is_over else token)
    said = [*user, *FORM.turn[1:]]
    while not answer or answer[-1] not in ENDS:
        token = draw([*said, *answer], temperature=temperature, top_k=20)
        answer.append(ENDS[0] if len(answer) == 11 else token)
    return user, answer, temperature


def parts(files):
    """``(user, answer, temperature)`` of every conversation in the files' arrays."""
    found = []
    for file in files:
        arrays = np.load(file)
        tok, phase, temp = (arrays[name][:, 0] for name in ("tok", "phase", "temp"))
        ends = [*np.flatnonzero(np.diff(phase.astype(int)) < 0) + 1, len(tok)]
        for start, stop in zip([0, *ends], ends, strict=False):
            t, p = tok[start:stop], phase[start:stop]
            warmth = float(temp[start])
            found.append((t[p == 0].tolist(), t[p == 6].tolist(), warmth))
            assert t[(p > 0) & (p < 6)].tolist() == list(FORM.turn[1:])
    return found


def test_every_token_is_drawn_from_its_law(tmp_path):
    files = selfgen(MODEL, tmp_path, conversations=11, rows=3, part=4, seed=5, **PLAN)
    assert [f.name for f in files] == [f"part-0000{i}.npz" for i in range(3)]
    found = parts(files)
    assert len(found) == 11
    for number, (user, answer, temperature) in enumerate(found):
        wanted = converse(5, number)
        assert (user, answer) == wanted[:2], number
        assert temperature == pytest.approx(wanted[2], rel=1e-3)  # stored as float16
    ends = {(len(user) == 10, len(answer) == 12) for user, answer, _ in found}
    assert len(ends) > 1  # cut ones and others
    assert {t for _, _, t in found} == {np.float16(t) for t in TEMPERATURES}


def test_it_is_a_corpus(tmp_path):
    files = selfgen(MODEL, tmp_path, conversations=9, rows=3, part=4, seed=1, **PLAN)
    read = corpus.read(files, TOKENIZER)
    assert (len(read.documents), read.target) == (9, "tiny")
    for document, (user, answer, _) in zip(read.documents, parts(files), strict=True):
        answer = answer[:-1] if len(answer) == 12 else answer
        head = [*FORM.prefix, *user, *FORM.turn[1:]]
        assert document.tokens.tolist() == head + answer
        assert document.mask.sum() == len(answer)


def test_the_batch_size_changes_nothing(tmp_path):
    arguments = {"conversations": 8, "part": 4, **PLAN}
    one = selfgen(MODEL, tmp_path / "one", rows=1, **arguments)
    three = selfgen(MODEL, tmp_path / "three", rows=3, **arguments)
    assert parts(one) == parts(three)


def test_a_folder_is_continued(tmp_path):
    whole = selfgen(MODEL, tmp_path / "whole", conversations=11, rows=3, part=4, **PLAN)
    some = tmp_path / "some"
    (first, short) = selfgen(MODEL, some, conversations=6, rows=3, part=4, **PLAN)
    assert len(parts([short])) == 2
    stamp = first.stat().st_mtime_ns
    # What a killed writer leaves.
    (some / ".part-00002.npz.partial").write_bytes(b"half a file")
    files = selfgen(MODEL, some, conversations=11, rows=3, part=4, **PLAN)
    assert first.stat().st_mtime_ns == stamp
    assert parts(files) == parts(whole)


@pytest.mark.parametrize("at", [2, 4, 6])
def test_signals_leave_whole_parts(tmp_path, monkeypatch, capfd, at):
    """Inside the first part, at its end, inside the second."""
    advance, sent = metrics.Meter.advance, []

    def interrupted(meter, done, tokens, note=""):
        advance(meter, done, tokens, note)
        if done >= at and not sent:
            sent.append(done)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(metrics.Meter, "advance", interrupted)
    arguments = {"conversations": 8, "rows": 1, "part": 4, **PLAN}
    with pytest.raises(SystemExit) as exit:
        selfgen(MODEL, tmp_path, **arguments)
    assert exit.value.code == 128 + signal.SIGTERM
    said = capfd.readouterr().err
    written = 4 * (at >= 4)
    assert f"SIGTERM: {written} conversations are in" in said
    assert len(parts(tmp_path.glob("*.npz"))) == written
    files = selfgen(MODEL, tmp_path, **arguments)
    assert len(parts(files)) == 8


PROMPTS = ["Why?", "Name 3 rivers.", "Hm"]


def test_given_prompts_are_answered(tmp_path):
    """At temperature 0, with what plain decoding of the rendered chat gives."""
    arguments = {"rows": 2, "part": 8, "answer_cap": 12, "temperatures": (0.0,)}
    files = selfgen(MODEL, tmp_path, prompts=PROMPTS, conversations=7, **arguments)
    found = parts(files)
    words = [user_tokens(TOKENIZER, prompt) for prompt in PROMPTS]
    assert [user for user, _, _ in found] == [
        [*words[i % 3], FORM.turn[0]] for i in range(7)
    ]
    chats = [[*FORM.prefix, *user, *FORM.turn[1:]] for user, _, _ in found]
    plain = jspec.generate(MODEL, None, chats, max_new_tokens=12).tokens
    for (_, answer, _), wanted in zip(found, plain, strict=True):
        cut = len(answer) == 12
        assert answer[: len(answer) - cut] == wanted[: len(wanted) - cut]
    once = selfgen(MODEL, tmp_path / "once", prompts=PROMPTS, **arguments)
    assert parts(once) == found[:3]


def test_openings_are_finished_by_the_target(tmp_path):
    """Each turn begins as given; what follows is drawn anew for every conversation."""
    settings = {"user_cap": 20, "answer_cap": 4, "rows": 3, "part": 8}
    files = selfgen(MODEL, tmp_path, openings=PROMPTS, conversations=8, **settings)
    users = [user for user, _, _ in parts(files)]
    words = [user_tokens(TOKENIZER, prompt) for prompt in PROMPTS]
    rest = [user[len(words[i % 3]) :] for i, user in enumerate(users)]
    assert all(words[i % 3] == u[: len(words[i % 3])] for i, u in enumerate(users))
    assert all(user[-1] == FORM.turn[0] and len(user) <= 21 for user in users)
    assert any(len(one) > 2 for one in rest)
    assert rest[0] != rest[3]


def test_mistakes_are_named(tmp_path):
    def refused(match, model=MODEL, **changes):
        arguments = {"conversations": 4, "rows": 3, "part": 4, **PLAN, **changes}
        with pytest.raises(ValueError, match=match):
            selfgen(model, tmp_path / "new", **arguments)

    refused("chat template", tiny.model())
    no_end = tiny.model(tokenizer=TOKENIZER, vocab_size=258)
    refused("no end-of-sequence id", no_end)
    refused("conversations is 0", conversations=0)
    refused("rows is 0", rows=0)
    refused("context of tiny ends at 128", answer_cap=120)
    refused("not both", prompts=PROMPTS, openings=PROMPTS)
    refused("more than user_cap 5", openings=PROMPTS, user_cap=5)
    refused("more than user_cap 5", prompts=PROMPTS, user_cap=5)
    refused("answer_cap 0", answer_cap=0)
    selfgen(MODEL, tmp_path / "new", conversations=4, rows=3, part=4, **PLAN)
    refused("begun with seed 0, not 1", seed=1)
    refused("begun with answer_cap 12, not 11", answer_cap=11)
    refused("begun with prompts", prompts=PROMPTS, user_cap=14)


def test_logits_that_are_not_finite_are_reported(tmp_path):
    broken = jax.tree.map(lambda x: x * jnp.nan, MODEL.params)
    model = jspec.Model("tiny", MODEL.target, broken, TOKENIZER, MODEL.dtype)
    with pytest.raises(FloatingPointError, match="logits of tiny are not finite"):
        selfgen(model, tmp_path, conversations=2, rows=3, part=4, **PLAN)


@pytest.mark.slow
def test_smollm2_talks_to_itself(tmp_path):
    model = jspec.load("smollm2-135m", dtype="float32")
    files = selfgen(
        model,
        tmp_path,
        conversations=4,
        rows=3,
        user_cap=12,
        answer_cap=10,
        temperatures=(0.0,),
    )
    documents = corpus.read(files, model.tokenizer).documents
    prompts = [d.tokens[~d.mask].tolist() for d in documents]
    plain = jspec.generate(model, None, prompts, max_new_tokens=9).tokens
    for document, prompt, wanted in zip(documents, prompts, plain, strict=True):
        assert document.tokens[document.mask].tolist() == wanted
        text = model.tokenizer.decode(prompt)
        assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
