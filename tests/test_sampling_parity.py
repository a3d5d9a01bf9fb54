"""Every option against transformers' own logits processors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation import logits_process as hf

from jspec import sampling as smp
from jspec.tree import ancestors
from jspec.types import Block

VOCAB, PROMPT, LENGTH = 60, 5, 9
PARENT = np.asarray([[-1, 0, 0, 1, 3, 2]], np.int32)
target_law = jax.jit(smp.target_law)
process = jax.jit(smp.process)


def normal(seed, shape, scale=3.0):
    return np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32)


def ours(z, tokens, drafted, **kwargs):
    """Logits of every node and the options, for one sequence and a tree."""
    o = smp.options(1, vocab_size=VOCAB, eos_ids=(2, 3), **kwargs)
    on = np.ones(PARENT.shape, bool)
    block, mask = Block(drafted, PARENT, on, on), ancestors(jnp.asarray(PARENT))
    length, start = np.array([LENGTH]), np.array([PROMPT])
    return process(z, o, tokens, length, start, block, mask), o, np.asarray(mask[0])


def theirs(z, tokens, drafted, mask, processors):
    """The same from transformers: node by node, each with its own prefix."""
    out = []
    for i, row in enumerate(z[0]):
        path = [drafted[0, j] for j in range(1, len(mask)) if mask[i, j]]
        ids = torch.tensor([[*tokens[0, :LENGTH].tolist(), *map(int, path)]])
        out.append(processors(ids, torch.tensor(row[None].copy()))[0].numpy())
    return np.stack(out)


def setting(seed):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, (1, 16)).astype(np.int32)
    drafted = rng.integers(0, VOCAB, PARENT.shape).astype(np.int32)
    drafted[0, 0] = tokens[0, LENGTH - 1]
    return normal(seed, (1, PARENT.shape[1], VOCAB)), tokens, drafted


EOS = torch.tensor([2, 3])
PROCESSORS = {
    "logit_bias": (
        {"logit_bias": {4: 1.5, 9: -3.0, 10: -np.inf}},
        hf.SequenceBiasLogitsProcessor({(4,): 1.5, (9,): -3.0, (10,): -np.inf}),
    ),
    "repetition_penalty": (
        {"repetition_penalty": 1.7},
        hf.RepetitionPenaltyLogitsProcessor(1.7),
    ),
    "forbidden_tokens": (
        {"forbidden_tokens": [0, 7, 30]},
        hf.NoBadWordsLogitsProcessor([[0], [7], [30]], EOS),
    ),
    "suppressed": (
        {"forbidden_tokens": [2, 7]},
        hf.SuppressTokensLogitsProcessor([2, 7]),
    ),
    "min_new_tokens": (
        {"min_new_tokens": 6},
        hf.MinNewTokensLengthLogitsProcessor(PROMPT, 6, EOS),
    ),
    "forced_tokens": (
        {"forced_tokens": {LENGTH + 1 - PROMPT: 3}},
        hf.ForcedEOSTokenLogitsProcessor(LENGTH + 2, 3),
    ),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_processor(name):
    kwargs, processor = PROCESSORS[name]
    z, tokens, drafted = setting(1)
    got, _, mask = ours(z, tokens, drafted, **kwargs)
    want = theirs(z, tokens, drafted, mask, processor)
    np.testing.assert_allclose(got[0], want, rtol=1e-6)
    assert not np.array_equal(want, z[0])


WARPERS = {
    "temperature": ({}, []),
    "top_k": ({"top_k": 7}, [hf.TopKLogitsWarper(7)]),
    "top_k of all": ({"top_k": 10**6}, [hf.TopKLogitsWarper(10**6)]),
    "top_p": ({"top_p": 0.9}, [hf.TopPLogitsWarper(0.9)]),
    "small top_p": ({"top_p": 1e-4}, [hf.TopPLogitsWarper(1e-4)]),
    "min_p": ({"min_p": 0.07}, [hf.MinPLogitsWarper(0.07)]),
    "all": (
        {"top_k": 30, "top_p": 0.85, "min_p": 0.02},
        [
            hf.TopKLogitsWarper(30),
            hf.TopPLogitsWarper(0.85),
            hf.MinPLogitsWarper(0.02),
        ],
    ),
}


@pytest.mark.parametrize("step", [0.0, 0.25], ids=["distinct", "tied"])
@pytest.mark.parametrize("vocab", [50, 30_000])
@pytest.mark.parametrize("name", WARPERS)
def test_warper(name, vocab, step):
    kwargs, warpers = WARPERS[name]
    z = normal(2, (1, 4, vocab), 1.0) * np.asarray([5, 3, 1, 0.1])[:, None]
    z = (np.round(z / step) * step if step else z).astype(np.float32)
    o = smp.options(1, vocab_size=vocab, temperature=0.7, **kwargs)
    scores = torch.tensor(z[0])
    for warper in [hf.TemperatureLogitsWarper(0.7), *warpers]:
        scores = warper(None, scores)
    want = torch.softmax(scores, -1).numpy()
    got = np.asarray(target_law(z, o).p[0])
    if step:  # which of the tokens tied at the edge of top-p stay is up to torch.sort
        got, want = np.sort(got), np.sort(want)
    np.testing.assert_array_equal(got > 0, want > 0)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-8)


def test_everything_in_the_order_of_generate():
    tiny = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **tiny, **heads))
    config = GenerationConfig(
        do_sample=True,
        temperature=1.4,
        top_k=20,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.8,
        sequence_bias={(4,): 4.0, (9,): -2.0},
        bad_words_ids=[[0], [7]],
        suppress_tokens=[11],
        min_new_tokens=6,
        eos_token_id=[2, 3],
        pad_token_id=0,
    )
    model._prepare_special_tokens(config)
    processors = model._get_logits_processor(config, input_ids_seq_length=PROMPT)
    for seed in range(5):
        z, tokens, drafted = setting(seed)
        got, o, mask = ours(
            z,
            tokens,
            drafted,
            temperature=1.4,
            top_k=20,
            top_p=0.9,
            min_p=0.05,
            repetition_penalty=1.8,
            logit_bias={4: 4.0, 9: -2.0},
            forbidden_tokens=[0, 7, 11],
            min_new_tokens=6,
        )
        want = torch.softmax(
            torch.tensor(theirs(z, tokens, drafted, mask, processors)), -1
        )
        p = target_law(got, o).p[0]
        np.testing.assert_array_equal(p > 0, want > 0)
        np.testing.assert_allclose(p, want, rtol=1e-5)
