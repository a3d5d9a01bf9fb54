"""Logits to a law, and draws from a law.

The order is that of transformers' ``generate``: bias, repetition, presence and
frequency penalties, forbidden tokens, minimum length, forced tokens; then temperature,
top-k, top-p, min-p. Whatever no sequence uses costs nothing: it stands under a
``lax.cond`` on the options' values, so that turning it on does not recompile either.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax

from jspec import pallas
from jspec.options import Sampling, options
from jspec.penalties import process
from jspec.randomness import noise, race, row_keys
from jspec.types import Array, Block, TargetLaw

__all__ = [
    "Sampling",
    "argmax",
    "draft",
    "draft_law",
    "draw",
    "law",
    "log_prob",
    "mask_padding",
    "noise",
    "options",
    "process",
    "race",
    "row_keys",
    "target_law",
]

_BLOCK = 256  # ids a block in two-level searches over the vocabulary
_SMALL, _WANTED = 64, 128  # candidates for truncation: ids a block, blocks kept


# Draws


def draw(u: Array, p: Array) -> Array:
    """Inverse CDF of one law ``p [V]`` at one uniform ``u`` in [0, 1): int32 id.

    ``p >= 0`` need not be normalised. The id always has ``p > 0``, whatever the
    rounding and also for ``u -> 1``; where ``p`` has no positive entry it is 0.

    Two levels: the block of 256 ids that holds ``u``, then the id inside the block. A
    cumulative sum over the whole vocabulary would cost several passes over memory.
    """
    blocks = _in_blocks(p.astype(jnp.float32), 0.0)
    mass = jnp.sum(blocks, -1)
    below = lax.cumsum(mass)
    x = u.astype(jnp.float32) * below[-1]
    block = _first_above(below, x, mass)
    rest = x - (below[block] - mass[block])
    row = blocks[block]
    token = block * _BLOCK + _first_above(lax.cumsum(row), rest, row)
    return jnp.minimum(token, p.shape[-1] - 1)


def _in_blocks(x: Array, fill: float, size: int = _BLOCK) -> Array:
    """``[..., V] -> [..., ceil(V / size), size]``, padded with ``fill``."""
    pad = -x.shape[-1] % size
    if pad:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, pad)], constant_values=fill)
    return rearrange(x, "... (block id) -> ... block id", id=size)


def _first_above(below: Array, x: Array, mass: Array) -> Array:
    """First index with ``below > x`` and ``mass > 0``; else the last with ``mass > 0``.

    Asking for mass matters: a parallel cumulative sum is not monotone in its last bits.
    """
    n = below.shape[-1]
    index = jnp.arange(n, dtype=jnp.int32)
    positive = mass > 0
    first = jnp.min(jnp.where((below > x) & positive, index, n))
    last = jnp.max(jnp.where(positive, index, 0))
    return jnp.where(first < n, first, last)


def argmax(z: Array) -> Array:
    """First index of the maximum over the last axis, int32; a NaN counts as +inf.

    XLA:CPU vectorises a maximum, here of blocks, but no argmax; elsewhere blocks would
    copy the logits. NaN is dealt with by hand, for such a maximum may lose one.
    """
    if pallas.platform() != "cpu":
        return jnp.argmax(jnp.where(jnp.isnan(z), jnp.inf, z), -1).astype(jnp.int32)
    blocks = _in_blocks(z, -jnp.inf)
    size = jnp.max(jnp.where(jnp.isnan(blocks), jnp.inf, blocks), -1)
    block = jnp.argmax(size, -1, keepdims=True)
    row = jnp.take_along_axis(blocks, block[..., None], -2)[..., 0, :]
    index = block[..., 0] * _BLOCK + jnp.argmax(row, -1)
    return index.astype(jnp.int32)


def mask_padding(logits: Array, vocab_size: int) -> Array:
    """Sets columns at and above ``vocab_size`` to -inf: rows that only pad the head."""
    if logits.shape[-1] == vocab_size:
        return logits
    return jnp.where(jnp.arange(logits.shape[-1]) < vocab_size, logits, -jnp.inf)


def log_prob(logits: Array, token: Array) -> Array:
    """Log-softmax of raw ``logits [..., V]`` at ``token [...]``, float32."""
    z = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(z, token[..., None], -1)[..., 0]
    return chosen - jax.nn.logsumexp(z, -1)


# Laws


def law(
    logits: Array,
    sampling: Sampling,
    tokens: Array,
    length: Array,
    start: Array,
    block: Block,
    mask: Array,
) -> TargetLaw:
    """The target's law at every node, from raw logits ``[B, N, V]``; see ``process``."""
    z = process(logits, sampling, tokens, length, start, block, mask)
    return target_law(z, sampling)


def target_law(z: Array, sampling: Sampling) -> TargetLaw:
    """The law of ``z [B, N, V]`` after temperature, top-k, top-p and min-p.

    Rows with temperature 0 are one-hot at their argmax. A warm row with a NaN or +inf,
    or with -inf only, has NaN probabilities, and ``best`` points at the culprit.
    """
    z = z.astype(jnp.float32)
    best = argmax(z)
    warm = sampling.temperature > 0

    def point() -> Array:
        return jax.nn.one_hot(best, z.shape[-1])

    def soft() -> Array:
        return jnp.where(warm[:, None, None], _soften(z, sampling), point())

    return TargetLaw(p=lax.cond(jnp.any(warm), soft, point), best=best)


def draft_law(logits: Array, sampling: Sampling) -> Array:
    """The law ``q [B, V]`` of a drafter's ``logits [B, V]`` under the same options.

    Only its likeness to the target's law matters, so penalties are left out. A drafter
    must return the very ``q`` that it drew from.
    """
    return target_law(logits[:, None], sampling).p[:, 0]


def draft(logits: Array, key: Array, sampling: Sampling) -> tuple[Array, Array]:
    """A token ``[B]`` of each row of a drafter's ``logits [B, V]``, and ``draft_law``.

    ``key [B]`` is consumed. Where all rows have temperature 0 nothing is drawn.
    """

    def drawn() -> tuple[Array, Array]:
        law = draft_law(logits, sampling)
        return jax.vmap(draw)(jax.vmap(jax.random.uniform)(key), law), law

    def best() -> tuple[Array, Array]:
        token = argmax(logits.astype(jnp.float32))
        return token, jax.nn.one_hot(token, logits.shape[-1])

    return lax.cond(jnp.any(sampling.temperature > 0), drawn, best)


def _soften(z: Array, s: Sampling) -> Array:
    """Temperature, top-k, top-p, min-p, softmax; greedy rows get any law.

    Top-k and top-p are found as the least logit that stays. Logits are compared as they
    came, undivided: XLA may fuse a division into what follows and round it otherwise
    there, and then a maximum is not equal to itself.
    """
    warm = s.temperature > 0
    # Below 1e-30 the quotient could overflow, and long before it the law is one-hot.
    scale = jnp.where(warm, jnp.maximum(s.temperature, 1e-30), 1.0)[:, None, None]
    top = jnp.max(z, -1, keepdims=True)

    def weigh(z: Array) -> Array:
        """Probabilities but for their norm; 1 for the most probable token."""
        return jnp.exp((z - top) / scale)

    k = jnp.where(warm, s.top_k, 0)[:, None]
    mass = jnp.where(warm, s.top_p, 1.0)[:, None]
    edge, last = lax.cond(
        jnp.any((k > 0) | (mass < 1)),
        lambda: _truncate(z, weigh, k, mass),
        lambda: _whole(z),
    )
    late = jnp.arange(z.shape[-1]) > last[..., None]
    drop = (z < edge[..., None]) | ((z == edge[..., None]) & late)
    weight = jnp.where(drop, 0.0, weigh(z))
    weight = jnp.where(weight < s.min_p[:, None, None], 0.0, weight)
    return weight / jnp.sum(weight, -1, keepdims=True)


def _whole(z: Array) -> tuple[Array, Array]:
    """Least value and last id of a row that is not cut, ``[B, N]``."""
    least = jnp.full(z.shape[:-1], -jnp.inf)
    return least, jnp.full(z.shape[:-1], z.shape[-1], jnp.int32)


def _truncate(z: Array, weigh: Callable, k: Array, mass: Array) -> tuple[Array, Array]:
    """What top-k (0 = off) followed by top-p (1 = off) keeps of ``z [B, N, V]``.

    Top-k keeps all ties with the k-th value. Top-p keeps the smallest set of most
    probable tokens with a sum of at least ``mass``, and one token in any case; of those
    that tie at its edge the lower ids (transformers keeps as many, in no fixed order).

    Returns:
      ``[B, N]`` the least value that is kept, and the last id kept of those with it.
    """
    few = _candidates(z)
    nothing, whole = _whole(z)

    def by_count() -> Array:
        kth = _threshold(z, few, jnp.ones_like, k.astype(jnp.float32))
        return jnp.where(k > 0, kth, nothing)

    kth = lax.cond(jnp.any(k > 0), by_count, lambda: nothing)

    def kept(z: Array) -> Array:
        return jnp.where(z < kth[..., None], 0.0, weigh(z))

    def by_mass() -> tuple[Array, Array]:
        wanted = jnp.where(mass < 1, mass * jnp.sum(kept(z), -1), 0.0)
        least = _threshold(z, few, kept, wanted)
        above = jnp.sum(jnp.where(z > least[..., None], kept(z), 0.0), -1)
        tie = (z == least[..., None]).astype(jnp.float32)
        n_tie, each = jnp.sum(tie, -1), kept(least[..., None])[..., 0]
        n_keep = jnp.clip(jnp.ceil((wanted - above) / each), 1, n_tie)
        split = (mass < 1) & (n_keep < n_tie)

        def last_tie() -> Array:
            # It holds the quantile (n_keep - 1/2) / n_tie of the uniform law of ties.
            pick = jnp.vectorize(draw, signature="(),(v)->()")
            return pick((n_keep - 0.5) / n_tie, tie)

        last = lax.cond(jnp.any(split), last_tie, lambda: whole)
        return jnp.where(mass < 1, least, kth), jnp.where(split, last, whole)

    return lax.cond(jnp.any(mass < 1), by_mass, lambda: (kth, whole))


def _candidates(z: Array) -> tuple[Array, Array]:
    """Few values of ``z [..., V]`` that hold all above a floor, and the floor ``[...]``.

    They are the blocks with the largest maxima; the floor is the least of these.
    """
    blocks = _in_blocks(z, -jnp.inf, _SMALL)
    best, which = lax.top_k(jnp.max(blocks, -1), min(_WANTED, blocks.shape[-2]))
    few = jnp.take_along_axis(blocks, which[..., None], -2)
    # Their minimum, not their last: a slice of the slice would hide the top_k from XLA.
    return rearrange(few, "... block id -> ... (block id)"), jnp.min(best, -1)


def _threshold(
    z: Array, few: tuple[Array, Array], weigh: Callable, wanted: Array
) -> Array:
    """Least value ``t [...]`` of ``z [..., V]`` with ``sum(weigh(z)[z > t]) < wanted``.

    Where the candidates above their floor weigh enough, they alone are searched.
    """
    value, floor = few
    light = weigh(value)
    heavy = jnp.sum(jnp.where(value > floor[..., None], light, 0.0), -1)
    enough = heavy >= wanted
    quick = _bisect(value, light, wanted)

    # Row by row, so that a sequence's law does not depend on the rest of its batch.
    def slow():
        return jnp.where(enough, quick, _bisect(z, weigh(z), wanted))

    return lax.cond(jnp.all(enough), lambda: quick, slow)


def _bisect(z: Array, weight: Array, target: Array) -> Array:
    """``_threshold`` by bisection over the ordered bits of float32: exact, 32 passes.

    A sort of 8 x 49152 values takes ten times as long on a CPU.
    """

    def halve(_, bounds):
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)
        mass = jnp.sum(jnp.where(z > _value(middle)[..., None], weight, 0.0), -1)
        found = mass < target
        return jnp.where(found, low, middle + 1), jnp.where(found, middle, high)

    bounds = _rank(jnp.min(z, -1)), _rank(jnp.max(z, -1))
    return _value(lax.fori_loop(0, 32, halve, bounds)[1])


def _rank(x: Array) -> Array:
    """float32 -> int32 with the same order."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _value(rank: Array) -> Array:
    """Inverse of ``_rank``."""
    bits = jnp.where(rank < 0, rank ^ 0x7FFFFFFF, rank)
    return lax.bitcast_convert_type(bits, jnp.float32)
