"""Drafters that know the answer, or know how to get it wrong.

They replay a continuation that was decoded before, so a test decides how many drafts
each round accepts: the way to put an end of sequence, a stop string, a budget or a full
cache at any index of an accepted block.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jspec.drafters.draft import Draft
from jspec.state import pending
from jspec.types import Array, Context, Drafter, DraftShape, Feedback, chain

NO_DRAFT = -1


@struct.dataclass
class Script:
    """Params of a scripted drafter.

    Attributes:
      text: ``[B, T]`` int32, the true committed tokens, prompt included.
      right: ``[B, R]`` int32; round ``r`` drafts ``right[:, r]`` true tokens and then
        false ones, or nothing at all where it is ``NO_DRAFT``. The last column repeats.
    """

    text: Array
    right: Array


@functools.cache
def _scripted(gamma: int, vocab_size: int) -> Drafter:
    def init(params: Script, context: Context):
        del params
        return jnp.zeros_like(context.length)

    def propose(params: Script, round_, key, context: Context):
        del key
        step = jnp.arange(gamma + 1)
        at = context.length[:, None] - 1 + step
        true = jnp.take_along_axis(
            params.text, jnp.minimum(at, params.text.shape[1] - 1), axis=1
        )
        column = jnp.minimum(round_, params.right.shape[1] - 1)[:, None]
        right = jnp.take_along_axis(params.right, column, axis=1)
        token = jnp.where(step <= right, true, (true + 1) % vocab_size)
        token = token.at[:, 0].set(pending(context))
        return chain(token, (step == 0) | (right != NO_DRAFT)), round_

    def update(params, round_, feedback: Feedback):
        del params
        return round_ + (feedback.verdict.n_accept >= 0)

    return Drafter(DraftShape(gamma + 1, gamma), init, propose, update)


def scripted(text, right, gamma: int, vocab_size: int) -> Draft:
    """Drafts as many true tokens in each round as ``right [B, R]`` says.

    Args:
      text: one list of committed token ids (prompt and continuation) a row.
      right: ``[B, R]`` or ``[R]`` counts in 0 .. gamma, or ``NO_DRAFT``.
      gamma: length of the chain.
      vocab_size: of the target; a false token is the true one plus 1, modulo this.
    """
    width = max(len(t) for t in text) + gamma + 1
    table = np.zeros((len(text), width), np.int32)
    for row, ids in zip(table, text, strict=True):
        row[: len(ids)] = ids
    counts = np.broadcast_to(np.atleast_2d(right), (len(text), np.shape(right)[-1]))
    script = Script(jnp.asarray(table), jnp.asarray(counts, jnp.int32))
    return Draft(_scripted(gamma, vocab_size), script, "scripted", vocab_size)


def oracle(text, gamma: int, vocab_size: int) -> Draft:
    """Always right: every draft is accepted."""
    return scripted(text, [gamma], gamma, vocab_size)


def wrong(text, gamma: int, vocab_size: int) -> Draft:
    """Always wrong: every draft is rejected."""
    return scripted(text, [0], gamma, vocab_size)


def mixture(
    text, gamma: int, vocab_size: int, seed: int = 0, rounds: int = 64
) -> Draft:
    """A seeded mixture of all counts, rounds without any draft included."""
    key = jax.random.key(seed)
    counts = jax.random.randint(key, (len(text), rounds), NO_DRAFT, gamma + 1)
    return scripted(text, np.asarray(counts), gamma, vocab_size)
