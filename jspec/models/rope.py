"""Rotary position embedding and its context-extension variants.

Frequencies follow transformers' ``modeling_rope_utils`` so that published checkpoints
meet the angles they were trained with.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.models.config import Rope
from jspec.pallas import platform
from jspec.types import Array


class Turns(NamedTuple):
    """``cos`` and ``sin``, each ``[B, N, 1, d/2]`` float32, one angle per pair.

    ``d`` of the ``D`` numbers of a head are rotated: ``Rope.fraction`` of them.
    """

    cos: Array
    sin: Array


def turns(rope: Rope, dim: int, position: Array) -> Turns:
    """Rotations of heads of size ``dim`` at ``position [B, N]`` (int32)."""
    if rope.kind != "proportional":
        dim = int(dim * rope.fraction)
    if rope.kind == "dynamic":
        frequency = _dynamic(rope, dim, position)
    else:
        frequency = jnp.asarray(frequencies(rope, dim), jnp.float32)
    angle = (position[..., None].astype(jnp.float32) * frequency)[:, :, None, :]
    cos, sin = _cos_sin(angle) if platform() != "cpu" else _once(angle)
    return Turns(cos * rope.attention_factor, sin * rope.attention_factor)


def _cos_sin(angle: Array) -> tuple[Array, Array]:
    return jnp.cos(angle), jnp.sin(angle)


def _once(angle: Array) -> tuple[Array, Array]:
    """``_cos_sin``, computed once.

    XLA:CPU would compute it anew for every head of every layer, a tenth of a prefill. It
    keeps what a branch returns; angles that are all 0 are the other branch.
    """

    def still(angle: Array) -> tuple[Array, Array]:
        return jnp.ones_like(angle), jnp.zeros_like(angle)

    return lax.cond(jnp.any(angle != 0), _cos_sin, still, angle)


def rotate(x: Array, turn: Turns) -> Array:
    """Rotates ``x [B, N, heads, D]``; pair ``i`` is ``(x_i, x_{i + d/2})``, ``d <= D``."""
    half = turn.cos.shape[-1]
    wide = x.astype(jnp.float32)
    a, b, rest = wide[..., :half], wide[..., half : 2 * half], x[..., 2 * half :]
    out = jnp.concatenate(
        [a * turn.cos - b * turn.sin, b * turn.cos + a * turn.sin], axis=-1
    )
    return jnp.concatenate([out.astype(x.dtype), rest], -1)


def frequencies(rope: Rope, dim: int) -> np.ndarray:
    """Inverse frequencies ``[D/2]`` in radians per position (all kinds but dynamic)."""
    base = rope.theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
    return {
        "default": lambda: base,
        "linear": lambda: base / rope.factor,
        "proportional": lambda: _proportional(rope, base),
        "llama3": lambda: _llama3(rope, base),
        "yarn": lambda: _yarn(rope, base, dim),
    }[rope.kind]()


def _dynamic(rope: Rope, dim: int, position: Array) -> Array:
    """NTK scaling by the length so far, ``[B, N, D/2]``.

    The base of a token depends on its own position only, so a token's key is the same
    whether it was scored alone, in a block or in a prefill chunk.
    """
    length = jnp.maximum(position + 1, rope.original).astype(jnp.float32)
    grow = rope.factor * length / rope.original - (rope.factor - 1)
    theta = rope.theta * grow ** (dim / (dim - 2))
    power = jnp.arange(0, dim, 2, dtype=jnp.float32) / dim
    return theta[..., None] ** -power


def _proportional(rope: Rope, base: np.ndarray) -> np.ndarray:
    """The first pairs of the whole head turn as they would alone; the others do not."""
    turning = np.arange(len(base)) < int(rope.fraction * 2 * len(base) // 2)
    return np.where(turning, base / rope.factor, 0.0)


def _llama3(rope: Rope, base: np.ndarray) -> np.ndarray:
    wavelength = 2 * math.pi / base
    longest = rope.original / rope.low_freq
    shortest = rope.original / rope.high_freq
    smooth = (rope.original / wavelength - rope.low_freq) / (
        rope.high_freq - rope.low_freq
    )
    between = (1 - smooth) * base / rope.factor + smooth * base
    scaled = np.where(wavelength > longest, base / rope.factor, base)
    return np.where((wavelength <= longest) & (wavelength >= shortest), between, scaled)


def _yarn(rope: Rope, base: np.ndarray, dim: int) -> np.ndarray:
    def pair_of(rotations):
        """The pair that makes this many rotations over the original context."""
        ratio = rope.original / (rotations * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (np.arange(dim // 2) - low) / max(high - low, 0.001)
    keep = 1 - np.clip(ramp, 0, 1)
    return base / rope.factor * (1 - keep) + base * keep
