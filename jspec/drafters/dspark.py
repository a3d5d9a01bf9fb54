"""DSpark: DFlash's block, its tokens chosen from the left, each with its confidence.

The rows' own logits U_k are computed at once; a small head adds what the tokens chosen so
far say, ``q_k = softmax((U_k + W2 z_k) / T)``, with ``z_k`` a code of low rank that one of
three links makes. A confidence head says of each draft, before it is drawn, how likely it
will be accepted if those before it are. Source: DSpark (2607.05147), sections 3 and 4.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec import sampling as smp
from jspec.drafters.diffusion import Design, Drafts, Weights, logits
from jspec.models.linear import linear
from jspec.types import Array


@struct.dataclass
class Markov:
    """Weights of the sequential head, of rank r.

    Attributes:
      before: ``[V, r]``, W1, codes of target ids.
      after: ``[V', r]``, W2, over draft ids.
      mix: the gate's ``[r, M + r]``, the recurrent link's ``[3 r, 2 r + M]``, or None.
      mix_bias: ``[r]`` or ``[3 r]``, or None.
    """

    before: Array
    after: Array
    mix: Any = None
    mix_bias: Any = None

    def start(self, batch: int) -> Array:
        """The state before the first token."""
        return jnp.zeros((batch, self.before.shape[1]))


@struct.dataclass
class Confidence:
    """Weights of the confidence head.

    Attributes:
      weight: ``[1, M]``, or ``[1, M + r]`` where it reads the previous token's code.
      bias: ``[1]``, or None.
      temperature: ``[G]`` that the logits are divided by, fitted afterwards
        (``calibration``); None before that.
    """

    weight: Array
    bias: Any = None
    temperature: Any = None


# Links: (head, state [B, r], code of the previous token [B, r], row [B, M]) -> (state, z)


def vanilla(joint: Markov, s: Array, e: Array, h: Array) -> tuple[Array, Array]:
    """``z = e``: a bigram model of low rank."""
    del joint, h
    return s, e


def gated(joint: Markov, s: Array, e: Array, h: Array) -> tuple[Array, Array]:
    """``z = sigmoid(G [h; e]) e``: how much the bigram counts depends on the row."""
    gate = linear(jnp.concatenate([h, e], -1), joint.mix, joint.mix_bias)
    return s, jax.nn.sigmoid(gate) * e


def rnn(joint: Markov, s: Array, e: Array, h: Array) -> tuple[Array, Array]:
    """A recurrent state over the whole path; ``s`` begins at zero."""
    all3 = linear(jnp.concatenate([s, e, h], -1), joint.mix, joint.mix_bias)
    gate, new, out = jnp.split(all3, 3, -1)
    gate = jax.nn.sigmoid(gate)
    s = gate * s + (1 - gate) * jnp.tanh(new)
    return s, jnp.tanh(out)


LINKS = {link.__name__: link for link in (vanilla, gated, rnn)}


def left_to_right(
    design: Design, params: Weights, hidden: Array, anchor: Array, key: Array, sampling
) -> Drafts:
    """Draws a block's tokens one after the other.

    ``params.joint`` is a ``Markov`` or a ``domino.Domino``. Arguments as of
    ``dflash.independent``.
    """
    joint = params.joint
    assert design.link is not None
    link, ids = design.link, params.to_target
    base = logits(design, params, hidden)
    keys = jax.vmap(lambda k: jax.random.split(k, hidden.shape[1]), out_axes=1)(key)

    def step(carry, row):
        s, previous = carry
        h, base, keys = row
        e = joint.before[previous]
        s, z = link(joint, s, e, h)
        token, law = smp.draft(base + linear(z, joint.after), keys, sampling)
        return (s, token if ids is None else ids[token]), (token, law, e)

    start = joint.start(anchor.shape[0]), anchor
    rows = jnp.moveaxis(hidden, 1, 0), jnp.moveaxis(base, 1, 0), keys
    _, out = lax.scan(step, start, rows)
    token, law, e = (jnp.moveaxis(x, 0, 1) for x in out)
    if params.confidence is None:
        return Drafts(token, law)
    chance = jax.nn.sigmoid(scaled(params.confidence, doubt(params, hidden, e)))
    return Drafts(token, law, chance)


def codes(link, joint: Any, previous: Array, hidden: Array) -> tuple[Array, Array]:
    """What a known path says of every row: ``z`` and the previous tokens' codes.

    Args:
      previous: ``[B, R]`` target ids, of the token before each guess.
      hidden: ``[B, R, M]`` normed rows.

    Returns:
      Two arrays ``[B, R, ..]``; ``z W2^T`` is added to the logits.
    """
    e = joint.before[previous]

    def step(s, row):
        return link(joint, s, *row)

    rows = jnp.moveaxis(e, 1, 0), jnp.moveaxis(hidden, 1, 0)
    _, z = lax.scan(step, joint.start(len(previous)), rows)
    return jnp.moveaxis(z, 0, 1), e


def doubt(params: Weights, hidden: Array, e: Array) -> Array:
    """Confidence logits ``[B, R]`` of rows ``hidden [B, R, M]``, previous codes ``e``.

    They depend on the tokens before a draft, never on the draft.
    """
    head: Confidence = params.confidence
    wide = head.weight.shape[-1] > hidden.shape[-1]
    x = jnp.concatenate([hidden, e], -1) if wide else hidden
    return linear(x, head.weight, head.bias)[..., 0].astype(jnp.float32)


def scaled(head: Confidence, logit: Array) -> Array:
    """``logit [B, G]`` over the fitted temperatures."""
    if head.temperature is None:
        return logit
    return logit / head.temperature[: logit.shape[1]]


def init(
    key: Array, link, vocab: int, draft_vocab: int, width: int, rank: int
) -> tuple[Markov, Confidence]:
    """A head that says nothing yet, and a confidence head without a view."""
    k_before, k_mix = jax.random.split(key)
    shape = {
        vanilla: None,
        gated: (rank, width + rank),
        rnn: (3 * rank, 2 * rank + width),
    }
    mix = mix_bias = None
    if shape[link] is not None:
        mix = 0.02 * jax.random.normal(k_mix, shape[link])
        mix_bias = jnp.zeros(mix.shape[0])
    markov = Markov(
        0.02 * jax.random.normal(k_before, (vocab, rank)),
        jnp.zeros((draft_vocab, rank)),
        mix,
        mix_bias,
    )
    return markov, Confidence(jnp.zeros((1, width + rank)), jnp.zeros(1))
