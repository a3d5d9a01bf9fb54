"""Domino: DFlash's block, corrected from the left by a GRU over its tokens.

Another link for ``dspark.left_to_right``: the state reads the target's embeddings of the
tokens chosen so far, and ``U_k + W2 silu(W1 [h_k; g_k])`` are the logits. The first
``pure`` guesses stay as they are. There is no confidence head.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jspec.models.linear import linear
from jspec.types import Array


@struct.dataclass
class Domino:
    """Weights of the correction. S is the size of the state, E that of the code.

    Attributes:
      before: ``[V, M]``, the target's embedding.
      after: ``[V', E]``, W2.
      mix: ``[E, M + S]``, W1.
      enter, stay: ``[3 S, M]`` and ``[3 S, S]`` of the GRU; gates reset, update, new.
      pure: static, guesses that are not corrected.
    """

    before: Array
    after: Array
    mix: Array
    enter: Array
    stay: Array
    pure: int = struct.field(pytree_node=False, default=0)

    def start(self, batch: int) -> tuple[Array, Array]:
        """The state before the first token, and the number of tokens read."""
        return jnp.zeros((batch, self.stay.shape[1])), jnp.zeros((batch, 1), jnp.int32)


def gru(joint: Domino, s: Any, e: Array, h: Array) -> tuple[Any, Array]:
    """``z = silu(W1 [h; g])``; see ``dspark`` for links."""
    g, count = s
    enter = jnp.split(linear(e, joint.enter), 3, -1)
    stay = jnp.split(linear(g, joint.stay), 3, -1)
    reset = jax.nn.sigmoid(enter[0] + stay[0])
    update = jax.nn.sigmoid(enter[1] + stay[1])
    new = jnp.tanh(enter[2] + reset * stay[2])
    g = (1 - update) * new + update * g
    z = jax.nn.silu(linear(jnp.concatenate([h, g], -1), joint.mix))
    return (g, count + 1), jnp.where(count < joint.pure, 0, z)
