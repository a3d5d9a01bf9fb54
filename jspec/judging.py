"""What the accept rules share: reading a block, what failures leave, the verdict.

Everything is for ONE sequence: the shapes of ``jspec.types`` without the leading ``B``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jspec.sampling import draw
from jspec.types import Array, Block, Law, Noise, Verdict

# Reading a block


class Drawn(NamedTuple):
    """A block as its law sees it: per node i, as a child of its parent.

    ``ok [N]``: may be accepted. ``px, qx [N]``: target's and draft's probability of its
    token, ``qx`` = 1 for a point mass. ``row(i)``: ``q`` of i's children ``[..., V]`` by
    target id, zero if degenerate.
    """

    ok: Array
    px: Array
    qx: Array
    row: Callable[[Array | slice], Array]


def read(block: Block, p: Array) -> Drawn:
    """Looks up every node's token in ``p [N, V]`` and in the block's law.

    Raises:
      ValueError: if ``law.q`` and ``law.to_target`` do not fit V.
    """
    up, vocab = parent(block), p.shape[-1]
    ok, px = eligible(block), p[up, block.token]
    q = block.law.q
    if q is None:
        zero = jnp.zeros((vocab,), p.dtype)
        return Drawn(ok, px, jnp.ones_like(px), lambda i: zero)
    source = _draft_ids(block.law, vocab)
    mass = jnp.sum(q, -1)
    sound = jnp.isfinite(mass) & (mass > 0)
    at = block.token if source is None else source[block.token]
    qx = jnp.where(sound[up], q.at[up, at].get(mode="fill", fill_value=0), 0)

    def row(i: Array | slice) -> Array:
        rows = jnp.where(sound[i][..., None], q[i], 0)
        if source is None:
            return rows
        return jnp.take(rows, source, axis=-1, mode="fill", fill_value=0)

    return Drawn(ok & (qx > 0), px, qx, row)


def _draft_ids(law: Law, vocab: int) -> Array | None:
    """Drawn id of every target id ``[V]``, V' where there is none; None: they agree."""
    assert law.q is not None
    size = law.q.shape[-1]
    if law.to_target is None:
        if size > vocab:
            raise ValueError(
                f"law.q has {size} ids and the target {vocab}: give law.to_target"
            )
        return None if size == vocab else jnp.minimum(jnp.arange(vocab), size)
    if law.to_target.shape != (size,):
        raise ValueError(
            f"law.to_target has shape {law.to_target.shape}, not ({size},) like law.q"
        )
    ids = jnp.arange(size, dtype=jnp.int32)
    return jnp.full((vocab,), size, jnp.int32).at[law.to_target].set(ids)


def parent(block: Block) -> Array:
    """Parents ``[N]`` as indices: 0 for the root too."""
    return jnp.maximum(block.parent, 0)


def eligible(block: Block) -> Array:
    """Nodes ``[N]`` that may be accepted if their parent is."""
    return block.live & block.vote & (block.parent >= 0)


def earlier_siblings(block: Block) -> Array:
    """``[N, N]``: is node j an earlier sibling of node i?"""
    node = jnp.arange(block.parent.shape[0])
    same = block.parent[:, None] == block.parent
    return same & (node < node[:, None])


def distinct(block: Block, ok: Array) -> Array:
    """``ok`` nodes less those whose token an earlier ``ok`` sibling has."""
    same = block.token[:, None] == block.token
    return ok & ~jnp.any(ok & same & earlier_siblings(block), -1)


def _first(mask: Array) -> Array:
    """First true column of every row of ``mask [N, N]``, -1 for none."""
    return jnp.where(jnp.any(mask, -1), jnp.argmax(mask, -1), -1).astype(jnp.int32)


# What failures leave


class Left(NamedTuple):
    """What failed children have left of every node's law; all ``[N]``.

    At node v it is ``left = relu(p - taken * q)``, zero at the tokens of tried children
    if these cannot come again, with sum ``mass``. For one p and q nested residuals have
    this form, ``relu(relu(p - b q) - c q) = relu(p - (b + c) q)``, and a child only
    fails when nothing is left of its token: scalars replace a stack of V-vectors.

    ``rest`` is the mass of q that is not yet drawn, ``budget`` the acceptance that the
    path down to v may still spend.
    """

    budget: Array
    taken: Array
    mass: Array
    rest: Array
    tried: Array


class Residuals(NamedTuple):
    """``Left`` at the start, how it changes, and the order of the trials.

    ``chance(s, c)`` is ``min(1, budget * left(x) / mass / q(x))`` for child c with token
    x, ``fail(s, c)`` the state after its failure, ``left(s, v)`` the ``[V]`` residual.
    ``child`` and ``sibling`` are ``[N]``: first child, next sibling, -1 for none.
    """

    start: Left
    chance: Callable[[Left, Array], Array]
    fail: Callable[[Left, Array], Left]
    left: Callable[[Left, Array], Array]
    child: Array
    sibling: Array


def residuals(block: Block, p: Array) -> Residuals:
    """The bookkeeping of the two tree rules for ``p [N, V]``; raises as ``read``."""
    draft = read(block, p)
    point = block.law.q is None
    once = point or not block.law.replace  # a tried token cannot be drawn again
    ok = distinct(block, draft.ok) if once else draft.ok
    vocab = p.shape[-1]

    def without_tried(row: Array, tried: Array, v: Array) -> Array:
        if not once:
            return row
        gone = jnp.where(tried & (block.parent == v), block.token, vocab)
        return row.at[gone].set(0, mode="drop")

    def left(s: Left, v: Array) -> Array:
        row = p[v] if point else jax.nn.relu(p[v] - s.taken[v] * draft.row(v))
        return without_tried(row, s.tried, v)

    def chance(s: Left, c: Array) -> Array:
        v = block.parent[c]
        x = jax.nn.relu(draft.px[c] - (0 if point else s.taken[v] * draft.qx[c]))
        ratio = s.budget[v] * s.rest[v] * x / (s.mass[v] * draft.qx[c])
        return jnp.where(x > 0, jnp.minimum(1, ratio), 0)

    def fail(s: Left, c: Array) -> Left:
        v = block.parent[c]
        budget, mass = s.budget[v], s.mass[v]
        s = s._replace(tried=s.tried.at[c].set(True))
        if point:
            new = jax.nn.relu(mass - draft.px[c])
        else:
            spent = budget * s.rest[v]
            # Bounded, for an infinity would meet the zeros of q.
            more = jnp.where(spent > 0, jnp.minimum(mass / spent, 1e30), 0)
            s = s._replace(taken=s.taken.at[v].add(more))
            new = jnp.sum(left(s, v))
            if once:
                # Summed anew: 1 - q(x) would lose the tail behind a likely token.
                rest = jnp.sum(without_tried(draft.row(v), s.tried, v))
                s = s._replace(rest=s.rest.at[v].set(rest))
        share = jnp.where(mass > 0, budget * new / mass, 0)
        budget = jnp.where(share > 0, share / (share + 1 - budget), 0)
        return s._replace(budget=s.budget.at[v].set(budget), mass=s.mass.at[v].set(new))

    one, none = jnp.ones_like(draft.px), jnp.zeros_like(ok)
    start = Left(one, jnp.zeros_like(one), one, one, none)
    node = jnp.arange(ok.shape[0])
    child = _first(ok & (block.parent == node[:, None]))
    sibling = _first(ok & earlier_siblings(block).T)
    return Residuals(start, chance, fail, left, child, sibling)


# The verdict


def chain_row(block: Block, draft: Drawn, i: Array | slice) -> Array:
    """``q [..., V]`` after nodes ``i`` of a chain, zero where the next cannot be kept."""
    ok = jnp.append(draft.ok[1:], False)[i]
    row = draft.row(i)
    if block.law.q is None:
        row = jax.nn.one_hot(jnp.roll(block.token, -1)[i], row.shape[-1])
    return jnp.where(ok[..., None], row, 0)


def emit(noise: Noise, block: Block, node: Array, p: Array, left: Array) -> Verdict:
    """Ends at ``node`` and draws from ``left [V]``, from ``p [V]`` if nothing is left."""
    return verdict(block, node, _next(noise, p, left))


def emit_chain(noise: Noise, block: Block, n: Array, p: Array, left: Array) -> Verdict:
    """``emit`` for a chain, whose node ``n`` has depth ``n``."""
    node = jnp.arange(block.token.shape[0], dtype=jnp.int32)
    path = jnp.where(node <= n, node, -1)
    return Verdict(path, n.astype(jnp.int32), _next(noise, p, left))


def _next(noise: Noise, p: Array, left: Array) -> Array:
    return draw(noise.next, jnp.where(jnp.sum(left) > 0, left, p)).astype(jnp.int32)


def deepest(block: Block, chosen: Array, score: Array | None = None) -> Array:
    """The deepest node whose ancestors and itself are ``chosen [N]``; else the root.

    Among equally deep ones the first, or the first with the largest ``score [N]``.
    """
    lost = path_sum(block, 1 - chosen.astype(jnp.int32))
    depth = jnp.where(lost == 0, _depth(block), -1)
    if score is not None:
        score = jnp.where(depth == jnp.max(depth), score, -jnp.inf)
    return jnp.argmax(depth if score is None else score).astype(jnp.int32)


def path_sum(block: Block, value: Array) -> Array:
    """Sum of ``value [N]`` over every node and its ancestors but the root, ``[N]``."""
    total = jnp.where(block.parent < 0, 0, value)
    for up in _jumps(block):
        total += total[up]
    return total


def verdict(block: Block, node: Array, next_token: Array) -> Verdict:
    """The verdict that ends at ``node`` and adds ``next_token``."""
    n_accept = _depth(block)[node]
    height = n_accept - jnp.arange(block.parent.shape[0], dtype=jnp.int32)
    path = jnp.full_like(height, node)
    for k, up in enumerate(_jumps(block)):
        path = jnp.where((height >> k) & 1 == 1, up[path], path)
    path = jnp.where(height >= 0, path, -1)
    return Verdict(path, n_accept, next_token.astype(jnp.int32))


def _depth(block: Block) -> Array:
    return path_sum(block, jnp.ones_like(block.parent))


def _jumps(block: Block) -> list[Array]:
    """``[N]`` arrays of every node's ancestor 1, 2, 4, ... levels up, at most the root.

    Enough for any depth below N: log2(N) gathers replace N dependent steps.
    """
    up = [parent(block)]
    while 2 ** len(up) < block.parent.shape[0]:
        up.append(up[-1][up[-1]])
    return up
