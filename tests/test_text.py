"""Prompts, stop strings and streaming text, with a byte-level tokenizer."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jspec
from jspec.testing import scripted, tiny
from jspec.testing.tiny import byte_tokenizer
from jspec.text import Detokenizer, encode

TOKENIZER = byte_tokenizer()
MODEL = tiny.model(seed=3, tokenizer=TOKENIZER, vocab_size=257)
SAMPLE = "naïve 🙂 日本語 and plain text"


def ids(text):
    return TOKENIZER(text)["input_ids"]


def in_pieces(text, sizes, stop=()):
    """Feeds a text in blocks of the given sizes: (pieces, tokens kept)."""
    detok, tokens, pieces = Detokenizer(TOKENIZER, stop), ids(text), []
    while tokens:
        size = sizes[len(pieces) % len(sizes)]
        piece, kept = detok.feed(tokens[:size])
        tokens = tokens[size:]
        pieces.append(piece)
        if kept is not None:
            return pieces, kept
    pieces.append(detok.flush())
    return pieces, None


@settings(max_examples=40)
@given(st.text(max_size=30), st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_joined_pieces_are_the_text(text, sizes):
    pieces, _ = in_pieces(text, sizes)
    assert "".join(pieces) == TOKENIZER.decode(ids(text))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 100])
@pytest.mark.parametrize("stop", ["日本", " and", "n", "🙂", "text"])
def test_a_stop_string_ends_the_text_wherever_blocks_end(size, stop):
    """Inside a block, across tokens and across blocks alike."""
    pieces, kept = in_pieces(SAMPLE, [size], (stop,))
    assert "".join(pieces) == SAMPLE[: SAMPLE.index(stop)]
    upto = SAMPLE[: SAMPLE.index(stop) + len(stop)]
    assert kept == len(ids(upto))


@pytest.mark.parametrize("size", [1, 3, 100])
def test_the_first_of_several_stop_strings_wins(size):
    pieces, _ = in_pieces(SAMPLE, [size], ("plain", "日", "zzz"))
    assert "".join(pieces) == SAMPLE[: SAMPLE.index("日")]


def test_what_might_become_a_stop_string_is_held_back():
    detok = Detokenizer(TOKENIZER, ("END",))
    assert detok.feed(ids("the E")) == ("the ", None)
    assert detok.feed(ids("N")) == ("", None)
    assert detok.feed(ids("T")) == ("ENT", None)


def test_a_stop_string_cuts_text_tokens_log_probs_counts_and_cache():
    prompt = ids("ab")
    plain = jspec.generate(MODEL, None, [prompt], max_new_tokens=40, stop=())
    text = [prompt + plain.tokens[0]]
    decoded = [TOKENIZER.decode(plain.tokens[0][:n]) for n in range(41)]
    ascii_at = [
        i
        for i, t in enumerate(plain.tokens[0])
        if decoded[i + 1][-1:].isascii() and i > 2
    ]
    stop = TOKENIZER.decode([plain.tokens[0][ascii_at[0]]])
    for draft in (None, scripted.oracle(text, 6, 257), scripted.mixture(text, 6, 257)):
        common = dict(max_new_tokens=40, stop=stop, log_prob=True)
        out = jspec.generate(MODEL, draft, [prompt], **common)
        n = len(out.tokens[0])
        assert out.tokens[0] == plain.tokens[0][:n]
        assert out.finish_reason == ["stop"]
        assert stop not in out.text[0]
        assert TOKENIZER.decode(out.tokens[0]).startswith(out.text[0] + stop)
        assert stop not in TOKENIZER.decode(out.tokens[0][:-1])
        assert len(out.log_prob[0]) == n == out.stats.new_tokens
        stream = jspec.stream(MODEL, draft, [prompt], rounds=2, **common)
        deltas = list(stream)
        assert "".join(d.text for d in deltas) == out.text[0]
        assert [t for d in deltas for t in d.tokens] == out.tokens[0]
        assert deltas[-1].finish_reason == "stop"
        assert all(d.finish_reason is None for d in deltas[:-1])


def test_truncation_leaves_the_state_of_the_committed_tokens():
    prompt = ids("ab")
    plain = jspec.generate(MODEL, None, [prompt], max_new_tokens=30).tokens[0]
    oracle = scripted.oracle([prompt + plain], 4, 257)
    request = jspec.prepare(MODEL, oracle, [prompt], max_new_tokens=30)
    state = request.run(request.prefill(), np.int32(3))
    assert int(state.length[0]) == 2 + 15
    for keep in (1, 4, 5, 6, 15):
        again = request.run(request.prefill(), np.int32(3))
        cut = jspec.truncate(again, np.array([2 + keep]), np.array([0]))
        assert int(cut.cache.length[0]) == 2 + keep - 1
        assert int(cut.emitted.sum()) == keep
        assert int(cut.round[0]) == -(-keep // 5)
        on = request.run(cut, np.int32(100))
        assert on.tokens[0, 2:32].tolist() == plain


@pytest.mark.parametrize("batch", [1, 3])
def test_streamed_text_is_the_generated_text(batch):
    prompts = [ids("ab"), ids("é"), ids("xyz")][:batch]
    out = jspec.generate(MODEL, None, prompts, max_new_tokens=24)
    text = [p + t for p, t in zip(prompts, out.tokens, strict=True)]
    stream = jspec.stream(
        MODEL, scripted.oracle(text, 5, 257), prompts, max_new_tokens=24
    )
    pieces = [""] * batch
    for delta in stream:
        pieces[delta.row] += delta.text
    assert pieces == out.text == stream.output.text
    assert pieces == [TOKENIZER.decode(t) for t in out.tokens]


def test_prompts_are_strings_or_ids():
    assert encode(TOKENIZER, ["ab", [1, 2]], 257) == [ids("ab"), [1, 2]]
    out = jspec.generate(MODEL, None, "ab", max_new_tokens=4)
    same = jspec.generate(MODEL, None, ids("ab"), max_new_tokens=4)
    assert out.tokens == same.tokens


def test_the_chat_template_is_applied_when_there_is_one():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "Q:{{ messages[0].content }} A:"
    assert encode(tokenizer, ["hi"], 257) == [ids("Q:hi A:")]
    assert encode(tokenizer, ["hi"], 257, chat=False) == [ids("hi")]
    with pytest.raises(ValueError, match="no chat template"):
        encode(TOKENIZER, ["hi"], 257, chat=True)


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_blank_text_is_refused(prompt):
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        encode(TOKENIZER, [prompt], 257)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="stop string is empty"):
        jspec.prepare(MODEL, None, "ab", stop=["x", ""])
