"""Corpora: file form, documents, packing, batches."""

import math
from pathlib import Path

import numpy as np
import pytest
from chats import EOS, START, chat_tokenizer, conversations, write_file
from transformers import AutoTokenizer

from jspec.models import aliases
from jspec.train import corpus as corpora
from jspec.train.template import fingerprint, template, user_tokens

TOKENIZER = chat_tokenizer()
SLICE = Path(__file__).parent / "data" / "smollm2_selfgen_slice.npz"


def ids(text):
    return TOKENIZER(text)["input_ids"]


@pytest.fixture
def corpus(tmp_path):
    sizes = np.random.default_rng(1).integers(2, 25, 40)
    return corpora.read(
        [write_file(tmp_path / "a.npz", conversations(sizes))], TOKENIZER
    )


def old_form(path, made, streams):
    """The same conversations in the first three arrays only, over several streams."""
    turn = template(TOKENIZER).turn[1:]
    columns = [[] for _ in range(streams)]
    for i, (user, answer, temp) in enumerate(made):
        phases = [0] * len(user)
        phases += [min(k + 1, 5) for k in range(len(turn))] + [6] * len(answer)
        rows = zip([*user, *turn, *answer], phases, strict=True)
        columns[i % streams] += [(t, p, temp) for t, p in rows]
    steps = min(map(len, columns))
    table = np.array([c[:steps] for c in columns])
    np.savez(
        path,
        tok=table[..., 0].T.astype(np.uint16),
        phase=table[..., 1].T.astype(np.uint8),
        temp=table[..., 2].T.astype(np.float16),
    )
    return path


def test_template_pieces():
    form = template(TOKENIZER)
    assert list(form.prefix) == ids("<s>system\nBe brief.<e>\n<s>user\n")
    assert list(form.turn) == ids("<e>\n<s>assistant\n")
    assert (form.prefix[0], form.turn[0]) == (START, EOS)


def test_user_tokens_are_the_words_alone():
    assert user_tokens(TOKENIZER, "why?") == ids("why?")
    assert user_tokens(TOKENIZER, "42 yes") == ids("42 yes")
    moody = (
        "{% for m in messages %}<s>{% if m.content | length > 9 %}Be patient.{% endif %}"
        "<s>{{ m.content }}<e>{% endfor %}"
    )
    assert user_tokens(chat_tokenizer(moody), "short") == ids("short")
    with pytest.raises(ValueError, match="other tokens"):
        user_tokens(chat_tokenizer(moody), "a long question")


@pytest.mark.parametrize(
    "text", [None, "{% for m in messages %}{{ m.content }}{% endfor %}"]
)
def test_a_template_is_needed(text):
    with pytest.raises(ValueError, match="chat template"):
        template(chat_tokenizer(text))


def test_fingerprint_sees_every_id():
    assert fingerprint(chat_tokenizer()) == fingerprint(TOKENIZER)
    assert fingerprint(chat_tokenizer(swap="ab")) != fingerprint(TOKENIZER)


def test_documents_are_what_was_written(tmp_path):
    made = conversations([3, 20, 7, 33])
    read = corpora.read([write_file(tmp_path / "a.npz", made)], TOKENIZER)
    form = template(TOKENIZER)
    assert (read.target, read.tokenizer) == ("tiny", fingerprint(TOKENIZER))
    for document, (user, answer, _), cut in zip(
        read.documents, made, [0, 1, 0, 1], strict=True
    ):
        head = [*form.prefix, *user, *form.turn[1:]]
        answer = answer[: len(answer) - cut]  # a written end is no word of the model's
        assert document.tokens.tolist() == head + answer
        assert document.tokens.dtype == np.int32
        assert document.mask.tolist() == [False] * len(head) + [True] * len(answer)
    assert read.tokens == sum(len(d.tokens) for d in read.documents)


def test_old_form_gives_the_same_documents(tmp_path):
    made = conversations([20, 5, 9, 14, 20, 3, 11, 6])
    new = corpora.read([write_file(tmp_path / "new.npz", made)], TOKENIZER)
    old = corpora.read([old_form(tmp_path / "old.npz", made, 2)], TOKENIZER)
    assert old.target == "unknown"
    kept = {d.tokens.tobytes(): d.mask.tobytes() for d in new.documents}
    assert 2 < len(old.documents) < len(made)  # streams end inside a conversation
    for document in old.documents:
        assert kept[document.tokens.tobytes()] == document.mask.tobytes()


def test_files_are_joined_and_split_from_the_end(tmp_path):
    a = write_file(tmp_path / "a.npz", conversations([4] * 30, seed=1))
    b = write_file(tmp_path / "b.npz", conversations([5] * 30, seed=2), target="other")
    both = corpora.read([a, b], TOKENIZER)
    assert both.target == "tiny, other"
    train, held = corpora.split(both)
    assert (len(train.documents), len(held.documents)) == (57, 3)
    last = corpora.read([b], TOKENIZER).documents[-3:]
    for one, other in zip(held.documents, last, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
    for share in (0.0, 0.001, 1.0):
        with pytest.raises(ValueError, match="share"):
            corpora.split(both, share)


def test_another_tokenizer_is_refused(tmp_path):
    path = write_file(tmp_path / "a.npz", conversations([5, 6]))
    with pytest.raises(ValueError, match="written by tiny with another tokenizer"):
        corpora.read([path], chat_tokenizer(swap="ab"))
    old = old_form(tmp_path / "old.npz", conversations([5, 6, 7]), 1)
    with pytest.raises(ValueError, match=r"phase 3.*another tokenizer or template"):
        corpora.read([old], chat_tokenizer(swap="ab"))
    arrays = dict(np.load(old))
    arrays["tok"][0, 0] = 300
    np.savez(old, **arrays)
    with pytest.raises(ValueError, match="token id 300, outside the vocabulary of 258"):
        corpora.read([old], TOKENIZER)


def test_damaged_files_are_named(tmp_path):
    path = write_file(tmp_path / "a.npz", conversations([5, 6]))
    with pytest.raises(FileNotFoundError, match=r"missing\.npz"):
        corpora.read([tmp_path / "missing.npz"], TOKENIZER)
    whole = path.read_bytes()
    for keep in (0, 10, len(whole) // 2, len(whole) - 30):
        path.write_bytes(whole[:keep])
        with pytest.raises(ValueError, match=r"a\.npz is cut off"):
            corpora.read([path], TOKENIZER)
    np.savez(path, tok=np.zeros((3, 1), np.uint16), phase=np.zeros((3, 1), np.uint8))
    with pytest.raises(ValueError, match="lacks the array 'temp'"):
        corpora.read([path], TOKENIZER)
    np.savez(path, tok=np.zeros((3, 1)), phase=np.zeros((4, 1)), temp=np.zeros((3, 1)))
    with pytest.raises(ValueError, match=r"phase has shape \(4, 1\)"):
        corpora.read([path], TOKENIZER)
    write_file(path, [])
    with pytest.raises(ValueError, match="no finished conversation"):
        corpora.read([path], TOKENIZER)
    with pytest.raises(ValueError, match="no corpus files"):
        corpora.read([], TOKENIZER)


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = write_file(tmp_path / "a.npz", conversations([5, 6]))
    before = path.read_bytes()

    def full(file, **arrays):
        file.write(b"a beginning")
        raise OSError("No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(OSError, match="No space left"):
        write_file(path, conversations([7]))
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.npz"]


# --- rows -----------------------------------------------------------------------------


def pieces(packed):
    """Every document of the rows as (tokens, mask), from the arrays alone."""
    found = []
    for tokens, document, position, mask in zip(
        packed.tokens, packed.document, packed.position, packed.mask, strict=True
    ):
        for number in np.unique(document[document >= 0]):
            (where,) = np.nonzero(document == number)
            assert where.tolist() == list(range(where[0], where[-1] + 1))
            assert position[where].tolist() == list(range(len(where)))
            found.append((tokens[where].tobytes(), mask[where].tobytes()))
        dead = document < 0
        assert not mask[dead].any()
        assert not tokens[dead].any() and not position[dead].any()
    return sorted(found)


@pytest.mark.parametrize("length", [60, 64, 100, 300])
def test_rows_hold_every_document_once(corpus, length):
    packed = corpora.rows(corpus, length, seed=3)
    assert packed.tokens.shape[1] == length
    cut = [(d.tokens[:length], d.mask[:length]) for d in corpus.documents]
    wanted = sorted((t.tobytes(), m.tobytes()) for t, m in cut if m.any())
    assert pieces(packed) == wanted


def test_no_more_rows_than_needed(corpus):
    assert len(corpora.rows(corpus, 300)) == math.ceil(corpus.tokens / 300)


def test_rows_are_a_function_of_the_seed(corpus):
    one, same, other = (corpora.rows(corpus, 128, seed=s).tokens for s in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert one.shape != other.shape or (one != other).any()


def test_the_first_rows_are_no_longer_than_the_others(corpus):
    sizes = [60] * 20 + [40] * 20
    documents = [
        corpora.Document(np.ones(n, np.int32), np.ones(n, bool)) for n in sizes
    ]
    packed = corpora.rows(corpus._replace(documents=documents), 64)
    long = np.sum(packed.document >= 0, 1) == 60
    assert len(packed) == 40 and 5 <= long[:20].sum() <= 15


def test_rows_without_answers_are_refused(corpus):
    with pytest.raises(ValueError, match="answer within its first 30 tokens"):
        corpora.rows(corpus, 30)
    with pytest.raises(ValueError, match="rows of 1 tokens"):
        corpora.rows(corpus, 1)


def test_batches_cover_an_epoch_and_are_addressed_by_step(corpus):
    packed = corpora.rows(corpus, 64)
    data = corpora.batches(packed, 4, seed=5)
    epoch = len(packed) // 4
    seen = np.concatenate([corpora.order(len(packed), 4, 5, i) for i in range(epoch)])
    assert len(set(seen.tolist())) == len(seen) == epoch * 4
    again = np.concatenate(
        [corpora.order(len(packed), 4, 5, epoch + i) for i in range(epoch)]
    )
    assert (seen != again).any()
    late = corpora.batches(packed, 4, seed=5)(7 * epoch + 2)
    for _ in range(5):
        data(0)
    np.testing.assert_array_equal(data(7 * epoch + 2).tokens, late.tokens)
    np.testing.assert_array_equal(
        late.mask, packed.mask[corpora.order(len(packed), 4, 5, 7 * epoch + 2)]
    )
    assert len(late) == 4 and late.features is None


def test_batches_need_enough_rows(corpus):
    packed = corpora.rows(corpus, 64)
    for size in (0, len(packed) + 1):
        with pytest.raises(ValueError, match=f"batches of {size} rows"):
            corpora.batches(packed, size)


# --- SmolLM2 ------------------------------------------------------------------------------


@pytest.mark.slow
def test_conversations_of_smollm2():
    """760 steps of six recorded streams, in the older form."""
    tokenizer = AutoTokenizer.from_pretrained(aliases.folder("smollm2-135m"))
    form = template(tokenizer)
    assert tokenizer.decode(form.prefix) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by "
        "Hugging Face<|im_end|>\n<|im_start|>user\n"
    )
    assert tokenizer.decode(form.turn) == "<|im_end|>\n<|im_start|>assistant\n"
    read = corpora.read([SLICE], tokenizer)
    lengths = [int(d.mask.sum()) for d in read.documents]
    assert max(lengths) == 273  # answers were cut at 274, a written end included
    for document, length in zip(read.documents, lengths, strict=True):
        text = tokenizer.decode(document.tokens)
        assert text.startswith(tokenizer.decode(form.prefix))
        assert text.count("<|im_start|>assistant\n") == 1
        assert (document.tokens[-1] == 2) == (length < 273)
        answer = document.tokens[document.mask]
        assert 2 not in answer[:-1]
        before = document.tokens[~document.mask]
        assert before[-len(form.turn) :].tolist() == list(form.turn)
