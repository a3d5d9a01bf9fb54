"""Scoring and judging a block in the fewest rows that hold its live nodes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jspec import sampling as smp
from jspec import tree, verify
from jspec.state import RUNNING, Params, State
from jspec.types import (
    POINT_MASS,
    Array,
    Block,
    Drafter,
    DraftShape,
    Rule,
    Scores,
    Target,
    Verdict,
)

_WIDTHS = (1, 2, 4, 8)  # nodes of a block that a packed forward's judge may stop after


def judged(
    params: Params,
    state: State,
    block: Block,
    key: Array,
    *,
    target: Target,
    drafter: Drafter,
    rule: Rule,
) -> tuple[Scores, Verdict, Array]:
    """Scores a block and judges it with ``key [B]``; what is dead costs neither, see
    ``score_live``.

    Returns:
      The scores, the verdict with a path of ``depth + 1`` entries, and the target's best
      token ``[B, N]`` at every live node.
    """
    shape, nodes = drafter.shape, block.token.shape[1]
    needed, mask = _of_running(block, state), tree.ancestors(block.parent)

    def judge(logits: Array) -> tuple[Verdict, Array]:
        # No node after these lives: the verdict is that on the whole block.
        width, vocab = logits.shape[1:]
        part, rows = block.first(width), min(width, shape.depth + 1)
        law = smp.law(
            logits,
            state.sampling,
            state.tokens,
            state.length,
            state.start,
            part,
            mask[:, :width, :width],
        )
        # As many uniforms in any width: they are not the same if drawn for fewer.
        noise = smp.noise(key, state.sampling, state.length, nodes, rows, vocab)
        noise = dataclasses.replace(noise, accept=noise.accept[:, :width])
        verdict = verify.batched(rule)(noise, part, law)
        path = _padded(verdict.path[:, :rows], shape.depth + 1, -1)
        return dataclasses.replace(verdict, path=path), _padded(law.best, nodes)

    out, (verdict, best) = score_live(
        target, params.target, state.cache, needed, shape, judge
    )
    return out, verdict, best


def score_live(
    target: Target, params, cache, block: Block, shape: DraftShape, then: Callable
) -> tuple[Scores, Any]:
    """Scores a block in the fewest rows, of those a drafter names, that hold its live nodes.

    One compiled program has a branch for every number of rows; scores of nodes that were
    left out mean nothing. ``then`` is called inside the branches, with the logits
    ``[B, n, V]`` of first nodes that hold all that live; what it returns must have the
    same shape for any n.

    Returns:
      The scores, and what ``then`` returned.
    """
    part, nodes = dataclasses.replace(block, law=POINT_MASS), shape.nodes
    score = functools.partial(target.score, params, cache, taps=shape.taps)

    def holds(width: int) -> Array:
        return ~jnp.any(block.live[:, width:])

    def narrow(width: int):
        out = score(part.first(width))
        found = then(out.logits)
        return jax.tree.map(lambda x: _padded(x, nodes), out), found

    def packed(count: int):
        out = score(part, packed=count)
        sizes = [w for w in _WIDTHS if w < nodes]
        fits = jnp.stack([*map(holds, sizes), jnp.bool_(True)])
        first = [lambda w=w: then(out.logits[:, :w]) for w in (*sizes, nodes)]
        return out, lax.switch(jnp.argmax(fits), first)

    batch, live = block.live.shape[0], jnp.sum(block.live)
    ways = [(batch * w, functools.partial(narrow, w), holds(w)) for w in shape.widths]
    for count in {math.ceil(p * batch) for p in shape.packs}:
        if count < batch * nodes:
            ways.append((count, functools.partial(packed, count), live <= count))
    if not ways:
        return narrow(nodes)
    ways.sort(key=lambda way: way[0])
    fits = jnp.stack([*(fits for _, _, fits in ways), jnp.bool_(True)])
    branches = [*(way for _, way, _ in ways), lambda: narrow(nodes)]
    return lax.switch(jnp.argmax(fits), branches)


def _padded(x: Array, size: int, fill: int = 0) -> Array:
    """``[B, n, ..] -> [B, size, ..]``."""
    pads = [(0, 0), (0, size - x.shape[1])] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, pads, constant_values=fill) if pads[1][1] else x


def _of_running(block: Block, state: State) -> Block:
    """What there is to score: of rows that have ended not even the root."""
    running = (state.reason == RUNNING)[:, None]
    return dataclasses.replace(block, live=block.live & running)
