"""Features of packed rows against decoding document by document, and their files."""

import functools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jspec.models.config import Rope
from jspec.models.flax_adapter import FlaxConfig, from_nnx
from jspec.models.load import load
from jspec.prefill import fill_cache
from jspec.testing import tiny
from jspec.train import feature_cache
from jspec.train.feature_cache import FeatureCache, cache_features, stored_taps
from jspec.train.features import extract, stream
from jspec.train.packing import Rows
from jspec.types import chain

GAP = 5e-6


def packed(sizes, length, vocab=61, seed=0):
    """Rows of random documents of these sizes, a list of sizes a row."""
    rng = np.random.default_rng(seed)
    shape = len(sizes), length
    tokens, position = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    document = np.full(shape, -1, np.int32)
    for row, lengths in enumerate(sizes):
        at = 0
        for number, size in enumerate(lengths):
            tokens[row, at : at + size] = rng.integers(vocab, size=size)
            document[row, at : at + size] = number
            position[row, at : at + size] = np.arange(size)
            at += size
    return Rows(tokens, document, position, document >= 0)


@functools.partial(jax.jit, static_argnames=("target", "taps"))
def step(params, cache, token, *, target, taps):
    return target.score(params, cache, chain(token), taps=taps)


def alone(target, params, tokens, taps):
    """Features of one document by itself, token by token, through the cache."""
    cache = target.init_cache(1, 32, jnp.float32)
    found = []
    for token in tokens:
        out = step(params, cache, jnp.array([[token]]), target=target, taps=taps)
        cache = cache.append(out.kv, jnp.zeros((1, 1), jnp.int32), jnp.array([1]))
        found.append(out.features[0, 0])
    return jnp.stack(found)


def assert_like_decoding(target, params, rows, taps):
    """Within rounding of float32: GAP of the largest value of a document."""
    found = extract(
        params, rows.tokens, rows.document, rows.position, target=target, taps=taps
    )
    both = [found.hidden] if not taps else [found.taps, found.hidden]
    both = np.concatenate(both, -1)
    for row in range(len(rows)):
        for number in np.unique(rows.document[row]):
            where = rows.document[row] == number
            if number < 0:
                assert not both[row][where].any()
                continue
            tokens = rows.tokens[row][where]
            wanted = alone(target, params, tokens, (*taps, -1))
            gap = np.abs(both[row][where] - wanted).max() / np.abs(wanted).max()
            assert gap < GAP


FAMILIES = {
    "llama": {},
    "window": {"windows": (None, 5)},
    "qwen3": {"family": "qwen3", "qk_norm": True},
    "gemma": {
        "zero_centred": True,
        "sandwich_norm": True,
        "embed_scale": 32**0.5,
        "windows": (4, None),
        "ropes": (Rope(theta=1e4), Rope(theta=1e6)),
        "qk_norm": True,
    },
    "dynamic": {"ropes": (Rope(kind="dynamic", factor=2.0, original=8),) * 2},
}
SIZES = [[7, 12, 1], [21], [3, 5, 4, 6]]


@pytest.mark.parametrize("family", FAMILIES)
def test_features_equal_decoding(family):
    model = tiny.model(seed=2, **FAMILIES[family])
    rows = packed(SIZES, 21)
    assert_like_decoding(model.target, model.params, rows, (0, 1, 2))


def test_without_taps_only_hidden_states():
    model = tiny.model()
    rows = packed(SIZES, 24)
    assert_like_decoding(model.target, model.params, rows, ())


class Averager(nnx.Module):
    """Means over what a token may see: obeys positions and mask, has taps."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(61, 16, rngs=rngs)
        self.place = nnx.Embed(64, 16, rngs=rngs)
        self.mix = nnx.Linear(16, 16, rngs=rngs)
        self.head = nnx.Linear(16, 61, rngs=rngs)

    def __call__(self, tokens, positions, mask, taps=None):
        x = self.embed(tokens) + self.place(positions)
        weight = mask / mask.sum(-1, keepdims=True)
        y = jnp.tanh(self.mix(jnp.einsum("bij,bjm->bim", weight, x)))
        if taps is None:
            return self.head(y)
        layers = {0: x, 1: y, -1: y}
        return self.head(y), jnp.concatenate([layers[t] for t in taps], -1)


def test_features_of_a_flax_module():
    config = FlaxConfig(vocab_size=61, max_position=64)
    target, params = from_nnx(Averager(nnx.Rngs(0)), config)
    assert_like_decoding(target, params, packed(SIZES, 24), (0, 1))


def test_features_do_not_depend_on_neighbours():
    """Not on documents before or after them, nor on padding, but for rounding."""
    model = tiny.model(seed=1)
    rows = packed(SIZES, 32)
    changed = rows.tokens.copy()
    changed[0, 7:19] = (changed[0, 7:19] + 5) % 61  # the second of three documents
    changed[0, 20:] = 3

    def hidden(tokens):
        return extract(
            model.params,
            tokens,
            rows.document,
            rows.position,
            target=model.target,
            taps=(1,),
        ).hidden

    one, other = hidden(rows.tokens), hidden(changed)
    np.testing.assert_allclose(one[0, :7], other[0, :7], atol=1e-6)
    np.testing.assert_allclose(one[0, 19:], other[0, 19:], atol=1e-6)
    assert np.abs(one[0, 7:19] - other[0, 7:19]).max() > 0.1
    np.testing.assert_array_equal(one[1:], other[1:])


def test_stream_adds_features_to_a_batch():
    model = tiny.model(seed=1)
    rows = packed(SIZES, 24)
    data = stream(
        model.params,
        lambda step: rows.take(np.array([step])),
        target=model.target,
        taps=(1, 2),
    )
    batch = data(2)
    assert batch.features.shape == (1, 24, 64) and batch.hidden.shape == (1, 24, 32)
    row = rows.take(np.array([2]))
    alone = extract(
        model.params,
        row.tokens,
        row.document,
        row.position,
        target=model.target,
        taps=(1, 2),
    )
    np.testing.assert_array_equal(batch.features, alone.taps)
    np.testing.assert_array_equal(batch.tokens[0], rows.tokens[2])


@pytest.mark.slow
def test_features_of_smollm2_equal_prefill():
    """Against its own prefill in chunks, document by document."""
    model = load("smollm2-135m", dtype="float32")
    taps = (2, 15, 27)
    rows = packed([[40, 60, 20]], 128, vocab=model.config.vocab_size)
    found = extract(
        model.params,
        rows.tokens,
        rows.document,
        rows.position,
        target=model.target,
        taps=taps,
    )
    for number, size in enumerate([40, 60, 20]):
        where = rows.document[0] == number
        tokens = np.pad(rows.tokens[0][where], (0, 1))[None]  # one more stays pending
        _, wanted = fill_cache(
            model.target,
            model.params,
            jnp.asarray(tokens),
            jnp.array([size + 1]),
            slots=64,
            chunk=16,
            taps=(*taps, -1),
        )
        got = np.concatenate([found.taps, found.hidden], -1)[0][where]
        for tap in range(4):
            part = slice(tap * 576, (tap + 1) * 576)
            ours, theirs = got[:, part], np.asarray(wanted[0, :size, part])
            gap = np.abs(ours - theirs).max() / np.abs(theirs).max()
            print(f"document {number}, tap {tap}: {gap:.1e} of the largest value")
            assert gap < GAP


# --- files ----------------------------------------------------------------------------


def cached(folder, rows, model, **arguments):
    return cache_features(
        folder, rows, model.params, target=model.target, taps=(0, 2), **arguments
    )


ROWS = packed([[5, 4], [9], [2, 2, 2], [8], [1, 7]], 10)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_cached_features_are_the_streamed_ones(tmp_path, dtype):
    model = tiny.model(seed=4)
    cache = cached(tmp_path, ROWS, model, batch=5, dtype=dtype)
    assert cache.done == 5
    streamed = stream(model.params, lambda _: ROWS, target=model.target, taps=(0, 2))(0)
    some = np.array([4, 0, 3])
    for stored, wanted in zip(
        cache.read(some), (streamed.features, streamed.hidden), strict=True
    ):
        np.testing.assert_array_equal(
            stored, wanted[some].astype(dtype).astype(jnp.float32)
        )
    batch = cache.batches(ROWS, 2, seed=1)(3)
    row = [t.tobytes() for t in ROWS.tokens].index(batch.tokens[0].tobytes())
    np.testing.assert_array_equal(
        batch.hidden[0], cache.read(np.array([row])).hidden[0]
    )


def test_a_cache_is_continued(tmp_path):
    model = tiny.model(seed=4)
    whole = cached(tmp_path / "whole", ROWS, model, batch=2)
    part = cached(tmp_path / "part", ROWS, model, batch=2, limit=3)
    assert part.done == 3
    data = part.batches(ROWS, 3)
    assert {t.tobytes() for t in data(0).tokens} == {
        t.tobytes() for t in ROWS.tokens[:3]
    }
    # What a writer leaves that is killed between the rows and the manifest.
    with open(tmp_path / "part" / "features.bin", "ab") as file:
        file.write(b"half a row")
    steps = []
    cached(tmp_path / "part", ROWS, model, batch=2, progress=lambda *x: steps.append(x))
    assert steps == [(5, 5)]
    np.testing.assert_array_equal(
        FeatureCache(tmp_path / "part").read(np.arange(5)).hidden,
        whole.read(np.arange(5)).hidden,
    )


def test_a_cache_serves_methods_that_read_less(tmp_path):
    model = tiny.model(seed=4)
    cache = cached(tmp_path, ROWS, model, dtype="float32")
    every, some = cache.read(np.arange(5)), np.array([3, 1])
    size = every.taps.shape[-1] // 2
    found = cache.read(some, (2,))
    np.testing.assert_array_equal(found.taps, every.taps[some][..., size:])
    np.testing.assert_array_equal(found.hidden, every.hidden[some])
    assert cache.read(some, ()).taps is None
    assert cache.batches(ROWS, 2, taps=(2, 0))(0).features.shape[-1] == 2 * size
    first = {t.tobytes() for t in ROWS.tokens[:2]}
    for number in range(3):  # rows that came later change nothing
        tokens = cache.batches(ROWS, 2, limit=2)(number).tokens
        assert {t.tobytes() for t in tokens} == first
    with pytest.raises(ValueError, match=r"layers \[0, 2\], wanted \[1\]"):
        cache.read(some, (1,))
    assert stored_taps(tmp_path, (2,)) == (0, 2)
    assert stored_taps(tmp_path, (1,)) == (1,)
    assert stored_taps(tmp_path / "none", (1,)) == (1,)


def test_features_of_something_else_are_refused(tmp_path):
    model = tiny.model(seed=4)
    cache = cached(tmp_path, ROWS, model)
    with pytest.raises(
        ValueError, match=r"holds features with target .*delete this one"
    ):
        cached(tmp_path, ROWS, tiny.model(seed=5))
    with pytest.raises(ValueError, match="with taps"):
        cache_features(tmp_path, ROWS, model.params, target=model.target, taps=(1,))
    other = packed([[5, 4]] * 5, 10, seed=9)
    with pytest.raises(ValueError, match="with rows"):
        cached(tmp_path, other, model)
    with pytest.raises(ValueError, match="with rows"):
        cache.batches(other, 2)
    with pytest.raises(ValueError, match="with dtype"):
        cached(tmp_path, ROWS, model, dtype="float16")
    with pytest.raises(ValueError, match="dtype int8"):
        cached(tmp_path, ROWS, model, dtype="int8")


def test_damaged_caches_are_named(tmp_path):
    model = tiny.model(seed=4)
    with pytest.raises(FileNotFoundError, match="manifest"):
        FeatureCache(tmp_path)
    cached(tmp_path, ROWS, model)
    data = tmp_path / "features.bin"
    data.write_bytes(data.read_bytes()[:-1])
    for use in (lambda: FeatureCache(tmp_path), lambda: cached(tmp_path, ROWS, model)):
        with pytest.raises(ValueError, match="shorter than the 5 rows"):
            use()
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        FeatureCache(tmp_path)


def test_large_features_do_not_become_infinite(tmp_path):
    model = tiny.model(seed=4, embed_scale=1e6)
    with pytest.raises(ValueError, match="does not fit float16; use dtype bfloat16"):
        cached(tmp_path / "half", ROWS, model, dtype="float16")
    cache = cached(tmp_path / "brain", ROWS, model, dtype="bfloat16")
    assert np.isfinite(cache.read(np.arange(5)).taps).all()


FULL = """
import resource, sys
sys.path.insert(0, "tests/train")
from test_features import ROWS, cached
from jspec.testing import tiny
# A file may not grow beyond three rows and a half, as on a disk that is full.
size = int(3.5 * 10 * 3 * 32 * 2)
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
try:
    cached(sys.argv[1], ROWS, tiny.model(seed=4), batch=1)
except OSError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_full_disk_leaves_a_usable_file(tmp_path):
    out = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "3 of 5 rows are there and usable" in out.stdout
    assert FeatureCache(tmp_path).done == 3
    assert json.loads((tmp_path / "manifest.json").read_text())["done"] == 3
    model = tiny.model(seed=4)
    whole = cached(tmp_path / "whole", ROWS, model, batch=1)
    done = cached(tmp_path, ROWS, model, batch=1)
    np.testing.assert_array_equal(
        done.read(np.arange(5)).hidden, whole.read(np.arange(5)).hidden
    )


def test_fingerprints_see_weights_and_config():
    one, other = tiny.model(seed=1), tiny.model(seed=1, norm_eps=1e-6)
    prints = {
        feature_cache.fingerprint(m.target, m.params)
        for m in (one, other, tiny.model(seed=2), tiny.model(seed=1))
    }
    assert len(prints) == 3
