"""Heads that are right about part of a few known texts, fitted by least squares."""

import jax
import jax.numpy as jnp
import numpy as np

from jspec.drafters import heads
from jspec.drafters.hydra import init_hydra
from jspec.drafters.multi_token import MultiToken, empty_cache, multi_token_forward
from jspec.prefill import fill_cache

RIDGE = 1.0  # enough for the heads to stay wrong now and then


def medusa(model, text, count):
    x, _, labels = rows(model, text, count)
    fresh = heads.init_medusa(model.params.head, 1).heads[0]
    return heads.Medusa(
        tuple(fresh.replace(vocab=vocabulary(model, x, y)) for y in labels)
    )


def blockwise(model, text, count, wide=24):
    x, _, labels = rows(model, text, count)
    weights = heads.init_blockwise(jax.random.key(1), model.params.head, count, wide)
    units = jax.nn.relu(x @ weights.up.T)
    aim = 8 * model.params.head / jnp.linalg.norm(model.params.head, axis=1)[:, None]
    down = [solve(units[y >= 0], (aim[y] - x)[y >= 0]) for y in labels]
    return weights.replace(down=jnp.stack(down))


def hydra(model, text, count):
    x, tokens, labels = rows(model, text, count)
    weights = init_hydra(model.params.embed, model.params.head, count)
    fitted = []
    for k, head in enumerate(weights.heads):
        path = [weights.embed[jnp.roll(tokens, -1 - i, 1)] for i in range(k + 1)]
        skip = jax.random.normal(jax.random.key(k), head.skip.shape)
        u = jnp.concatenate([x, *path], -1)
        vocab = vocabulary(model, u @ skip.T, labels[k])
        fitted.append(head.replace(skip=skip, vocab=vocab))
    return weights.replace(heads=tuple(fitted))


def multi_token(model, text, layers):
    config = model.config
    x, _, labels = rows(model, text, len(layers), tap=config.layers - 1)
    weights = MultiToken(layers, model.params.final_norm, model.params.head)
    cache = empty_cache(weights, config, len(text), 1, x.dtype)
    out, _ = multi_token_forward(weights, x, cache, config)
    out = jnp.moveaxis(out, 2, 0)  # a head after the other, like the labels
    return weights.replace(vocab=vocabulary(model, out, labels))


def rows(model, text, count, tap=-1):
    """Features ``[B, T, M]``, tokens ``[B, T]`` and for each head the token to guess.

    Labels are ``[count, B, T]``, -1 where a text ends before the label or has no feature.
    """
    length = max(map(len, text))
    tokens = np.zeros((len(text), length), np.int32)
    labels = np.full((count, *tokens.shape), -1)
    for b, ids in enumerate(text):
        tokens[b, : len(ids)] = ids
        for k in range(count):
            labels[k, b, : len(ids) - 2 - k] = ids[2 + k :]
    _, features = fill_cache(
        model.target,
        model.params,
        jnp.asarray(tokens),
        jnp.array([len(ids) for ids in text]),
        slots=length,
        taps=(tap,),
    )
    return features, tokens, labels


def vocabulary(model, x, labels):
    """A vocabulary product ``[V, M]`` that guesses ``labels [...]`` from ``x [..., M]``."""
    known = labels >= 0
    return solve(x[known], np.eye(model.config.vocab_size)[labels[known]])


def solve(x, y):
    """``W [out, in]`` with ``W x`` about ``y`` for rows of ``x`` and ``y``, by ridge."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    gram = x.T @ x + RIDGE * np.eye(x.shape[1])
    return jnp.asarray(np.linalg.solve(gram, x.T @ y).T, jnp.float32)
