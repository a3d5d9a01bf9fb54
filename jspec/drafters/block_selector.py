"""DFlash-2's selector: each row's best candidates, judged by the token before them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec import sampling as smp
from jspec.drafters.diffusion import Design, Drafts, Weights, logits
from jspec.models.linear import linear
from jspec.types import Array


@struct.dataclass
class Selector:
    """Weights of the selector, of rank r.

    Attributes:
      predecessor, successor: ``[V, r]`` codes of a token as the one before, and as the
        candidate.
      project: ``[r, M]``, of a row.
      count: static, candidates a row.
    """

    predecessor: Array
    successor: Array
    project: Array
    count: int = struct.field(pytree_node=False, default=16)


def selected(
    design: Design, params: Weights, hidden: Array, anchor: Array, key: Array, sampling
) -> Drafts:
    """Walks the rows from the left, each over its ``count`` best tokens.

    ``score(b) = U(b) + <A[previous] * P h, B[b]>`` with U the row's own logits; linear in
    the candidates, not in the vocabulary. The law is zero outside the candidates.
    Arguments as of ``dflash.independent``. Source: DFlash-2, the bilinear selector.
    """
    joint: Selector = params.joint
    unary = logits(design, params, hidden)
    value, ids = lax.top_k(unary, joint.count)
    aim = linear(hidden, joint.project)
    keys = jax.vmap(lambda k: jax.random.split(k, hidden.shape[1]), out_axes=1)(key)

    def step(previous: Array, row):
        value, ids, aim, keys = row
        score = value + _bilinear(joint, previous, aim, ids)
        at, few = smp.draft(score, keys, sampling)
        token = jnp.take_along_axis(ids, at[:, None], 1)[:, 0]
        return token, (token, few)

    over_rows = [jnp.moveaxis(x, 1, 0) for x in (value, ids, aim)]
    _, (token, few) = lax.scan(step, anchor, (*over_rows, keys))
    spread = jax.vmap(jax.vmap(lambda ids, p, row: jnp.zeros_like(row).at[ids].set(p)))
    law = spread(ids, jnp.moveaxis(few, 0, 1), unary)
    return Drafts(jnp.moveaxis(token, 0, 1), law)


def scores(
    joint: Selector, unary: Array, hidden: Array, previous: Array
) -> tuple[Array, Array]:
    """Scores and ids ``[n, C]`` of the candidates after known tokens ``previous [n]``."""
    value, ids = lax.top_k(unary, joint.count)
    return value + _bilinear(joint, previous, linear(hidden, joint.project), ids), ids


def _bilinear(joint: Selector, previous: Array, aim: Array, ids: Array) -> Array:
    code = joint.predecessor[previous] * aim
    return jnp.einsum("br,bcr->bc", code, joint.successor[ids])


def init(key: Array, vocab: int, width: int, rank: int, count: int = 16) -> Selector:
    """Codes and projection as published: normal, 0.02."""
    ks = jax.random.split(key, 3)
    shapes = (vocab, rank), (vocab, rank), (rank, width)
    parts = (0.02 * jax.random.normal(k, s) for k, s in zip(ks, shapes, strict=True))
    return Selector(*parts, count=count)
