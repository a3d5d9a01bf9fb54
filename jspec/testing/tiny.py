"""Tiny random models: real architectures that run in milliseconds."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jspec.models import Config, Model, architecture
from jspec.models.config import Rope

_BASE = Config(
    family="llama",
    vocab_size=61,
    hidden=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate=48,
    query_scale=8**-0.5,
    windows=(None, None),
    ropes=(Rope(), Rope()),
    max_position=512,
)


def config(**changes) -> Config:
    """A two-layer Llama of 61 tokens, with fields of ``Config`` changed at will."""
    layers = changes.get("layers", _BASE.layers)
    per_layer = {"windows": (None,) * layers, "ropes": (Rope(),) * layers}
    return dataclasses.replace(_BASE, **{**per_layer, **changes})


def model(seed: int = 0, scale: float = 0.3, tokenizer=None, **changes) -> Model:
    """A random model; ``changes`` are fields of ``Config``.

    ``scale`` is large enough that greedy continuations are not constant.
    """
    cfg = config(**changes)
    params = architecture.init(cfg, jax.random.key(seed), scale=scale)
    return Model(
        name="tiny",
        target=architecture.target(cfg),
        params=params,
        tokenizer=tokenizer,
        dtype=jnp.dtype(jnp.float32),
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, 257 in all, so that every emoji is split over tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)} | {"<eos>": 256}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
