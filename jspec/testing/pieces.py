"""What a rule, taken as a black box, emits for given noise, and where that changes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec.testing.enumeration import Cases
from jspec.types import Array, Block, Law, Noise, Rule, TargetLaw
from jspec.verify import batched

_CHUNK = 1024  # verdicts in one call
_BITS = 26  # resolution of a breakpoint, as a part of its box

# (blocks [E], uniforms [E, N + 1]) -> outcomes [E]; the last uniform is noise.next.
Judge = Callable[[np.ndarray, np.ndarray], np.ndarray]


def outcomes(
    rule: Rule,
    cases: Cases,
    law: Law,
    which: np.ndarray,
    uniform: np.ndarray,
    race: np.ndarray,
) -> np.ndarray:
    """What is emitted in blocks ``which [E]``, each with its own noise, as numbers.

    The tokens are the number's digits in base V + 1, the first token the lowest digit,
    and V marks the places after the last one.

    Args:
      rule: for one sequence.
      cases: D blocks.  law: their common law but for q.
      which: ``[E]`` indices of blocks.
      uniform: ``[E, N + 1]``, the last one being ``noise.next``.
      race: ``[E, P, V]`` or ``[1, P, V]``.

    Raises:
      ValueError: if a verdict's path is none of the block, or its token no id.
    """
    judge, codes = _judge(rule), []
    race = np.broadcast_to(race, (len(which), *race.shape[1:]))
    # Arrays of one size at a time, so that the rule is compiled once.
    for start in range(0, len(which), _CHUNK):
        part = np.minimum(np.arange(start, start + _CHUNK), len(which) - 1)
        c = jax.tree.map(lambda x, at=which[part]: x[at], cases)
        codes.append(judge(c, law.to_target, uniform[part], race[part], law.replace))
    code = np.concatenate([*map(np.asarray, codes)])[: len(which)]
    if np.any(code < 0):
        raise ValueError("the rule left the block or the vocabulary")
    return code


@functools.lru_cache(maxsize=64)
def _judge(rule: Rule) -> Callable:
    @functools.partial(jax.jit, static_argnums=4)
    def judge(c: Cases, to_target, uniform: Array, race: Array, replace: bool):
        noise = Noise(uniform[:, :-1], uniform[:, -1], race)
        block = Block(c.token, c.parent, c.live, c.vote, Law(c.q, to_target, replace))
        best = jnp.argmax(c.p, -1).astype(jnp.int32)
        out = batched(rule)(noise, block, TargetLaw(c.p, best))
        path, child = out.path, jnp.maximum(jnp.roll(out.path, -1, -1), 0)

        def at(x: Array, node: Array) -> Array:
            return jnp.take_along_axis(x, node, -1)

        nodes, vocab = c.p.shape[1:]
        depth = min(race.shape[1], nodes) - 1
        step, n = jnp.arange(nodes), out.n_accept[:, None]
        alive = at(c.live & c.vote, child) & (child > 0) & (at(c.parent, child) == path)
        good = jnp.where(step < n, alive, True) & ((path >= 0) == (step <= n))
        good = jnp.all(good, -1) & (path[:, 0] == 0)
        good &= (out.n_accept >= 0) & (out.n_accept <= depth)
        good &= (out.next_token >= 0) & (out.next_token < vocab)
        token = jnp.where(step < n, at(c.token, child), out.next_token[:, None])
        digit = jnp.where(step <= n, token, vocab)[:, : depth + 1]
        place = (vocab + 1) ** jnp.arange(depth + 1)
        return jnp.where(good, jnp.sum(digit * place, -1), -1)

    return judge


class Cuts(NamedTuple):
    """Of M boxes: does the outcome change, along which axis, where; or the outcome."""

    found: np.ndarray
    axis: np.ndarray
    at: np.ndarray
    code: np.ndarray


def cuts(
    judge: Judge, which: np.ndarray, low: np.ndarray, high: np.ndarray, random
) -> Cuts:
    """Looks for a change of outcome inside the boxes ``low <= u < high [M, K]``.

    From the lowest corner, the highest, and two random points, the outcome is compared
    with the one at the end of every axis, until one differs.
    """
    boxes, axes = low.shape
    top = np.nextafter(high, low)
    inner = random.uniform(size=(2, boxes, axes)).astype(np.float32)
    inner = np.clip(low + inner * (high - low), low, top)
    out = Cuts(*(np.zeros(boxes, t) for t in (bool, int, np.float32, int)))
    todo, column = np.arange(boxes), np.arange(axes)
    for start, end in ((low, top), (top, low), (inner[0], low), (inner[1], top)):
        if not len(todo):
            break
        point = np.repeat(start[todo, None], axes + 1, 1)
        point[:, column, column] = end[todo]
        code = judge(np.repeat(which[todo], axes + 1), point.reshape(-1, axes))
        code = code.reshape(-1, axes + 1)
        out.code[todo] = code[:, -1]
        differs = code[:, :-1] != code[:, -1:]
        hit = np.any(differs, -1)
        box, axis = todo[hit], np.argmax(differs, -1)[hit]
        out.found[box], out.axis[box] = True, axis
        out.at[box] = _search(
            judge, which[box], start[box], axis, end[box, axis], code[hit, -1]
        )
        todo = todo[~hit]
    return out


def _search(judge: Judge, which, start, axis, far, code) -> np.ndarray:
    """First value at which ``code`` is lost between ``start`` and ``far`` on ``axis``.

    Rather than by halves, by as many parts as fill a call.
    """
    boxes, axes = start.shape
    if not boxes:
        return far
    row = np.arange(boxes)
    near = start[row, axis]
    parts = int(np.clip(_CHUNK // boxes, 1, 63)) + 1
    for _ in range(int(np.ceil(_BITS / np.log2(parts)))):
        step = (np.arange(1, parts) / parts).astype(np.float32)
        value = near[:, None] + step * (far - near)[:, None]
        point = np.repeat(start[:, None], parts - 1, 1)
        point[row, :, axis] = value
        new = judge(np.repeat(which, parts - 1), point.reshape(-1, axes))
        lost = new.reshape(-1, parts - 1) != code[:, None]
        first = np.where(np.any(lost, -1), np.argmax(lost, -1), parts - 1)
        edge = np.concatenate([near[:, None], value, far[:, None]], -1)
        near, far = edge[row, first], edge[row, first + 1]
    return np.maximum(near, far)
