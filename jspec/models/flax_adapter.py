"""Any causal language model written in Flax as a target, by full recomputation.

All that is asked of the module is a plain forward without a cache,
``tokens [B, T], positions [B, T], mask [B, T, T] -> logits [B, T, V]``. The adapter's
cache holds token ids; every ``score`` runs the module over the whole buffer, so a round
costs O(T) tokens and O(T^2) attention, T being cache slots plus block nodes. Output is
exact, speed is not the point: for that, write ``score`` with a KV cache, as
``jspec.models.transformer`` does.

``mask[b, i, j]`` is true iff token ``i`` may attend to token ``j``. The module must obey
mask and positions and add no causal mask of its own: siblings of a tree share a
position, and the buffer has gaps. What a round asks for, with 2 of 4 slots live and a
root with two children (``.`` false, rows attend to columns)::

                  slots      block
    position    0 1 - -    2 3 3
      slot 0    x . . .    . . .
      slot 1    x x . .    . . .
      dead      x x x .    . . .     sees itself too: a row without any key is NaN
      dead      x x . x    . . .
      root      x x . .    x . .
      child     x x . .    x x .
      child     x x . .    x . x
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx, struct
from jax import lax

from jspec import tree
from jspec.types import Array, Block, Scores, Target


@dataclasses.dataclass(frozen=True)
class FlaxConfig:
    """What jspec must know of a model; a ``jspec.Config`` serves as well.

    Attributes:
      vocab_size: V, the width of the logits.
      max_position: longest context, in tokens.
      eos_ids: token ids that end a text.
    """

    vocab_size: int
    max_position: int
    eos_ids: tuple[int, ...] = ()


@struct.dataclass
class TokenCache:
    """The committed tokens but the pending one; stands in for a ``KVCache``.

    Attributes:
      tokens: ``[B, S]`` int32.
      length: ``[B]`` int32; slots at ``>= length`` mean nothing.
    """

    tokens: Array
    length: Array

    @property
    def slots(self) -> int:
        return self.tokens.shape[1]

    def append(self, kv: Array, path: Array, count: Array) -> TokenCache:
        """Stores the first ``count [B]`` nodes of ``path [B, P]`` (ids, -1 = none).

        ``kv [B, N]`` holds the block's tokens. All P rows are written at ``length``:
        the caller leaves room for them, ``length + P <= slots``.
        """
        rows = jnp.take_along_axis(kv, jnp.maximum(path, 0), axis=1)
        tokens = jax.vmap(lax.dynamic_update_slice_in_dim, in_axes=(0, 0, 0, None))(
            self.tokens, rows, self.length, 0
        )
        return dataclasses.replace(self, tokens=tokens, length=self.length + count)

    def crop(self, slots: int) -> TokenCache:
        """The same cache with fewer slots; ``length`` must fit."""
        return dataclasses.replace(self, tokens=self.tokens[:, :slots])

    def rewind(self, length: Array) -> TokenCache:
        """The cache of the first ``length [B]`` tokens (at most the present length)."""
        return dataclasses.replace(self, length=length)


@functools.cache
def target(apply: Callable, config: Any, tapped: Callable | None = None) -> Target:
    """A target from a pure, cache-free forward; equal arguments give the same object.

    Args:
      apply: ``(params, tokens [B, T], positions [B, T], mask [B, T, T]) -> logits
        [B, T, V]``, int32 and bool in, any float out.
      config: hashable, with ``vocab_size``, ``eos_ids`` and ``max_position``: a
        ``FlaxConfig`` or a ``jspec.Config``.
      tapped: the same with one more argument ``taps=``, a tuple of layer ids with the
        meaning of ``jspec.Target``, returning ``(logits, features [B, T, F])``. None
        when the model has no taps; drafters that ask for them are then refused.

    Raises:
      ValueError: from ``score``, for taps without ``tapped`` and for logits that are
        not ``[B, T, V]``.
    """
    return Target(
        config=config,
        init_cache=_init_cache,
        score=functools.partial(_score, apply, tapped, config),
    )


def from_nnx(module: nnx.Module, config: Any) -> tuple[Target, Any]:
    """``(target, params)`` of an NNX module; put both into a ``jspec.Model``.

    The module is called as ``module(tokens, positions, mask)``, and as ``module(tokens,
    positions, mask, taps=taps)`` for features if it has that argument. Split the module
    in evaluation mode (``module.eval()``); what it writes to its state is dropped.
    """
    graph, params = nnx.split(module)
    apply = _nnx_apply(graph)
    return target(apply, config, _if_tapped(module, apply)), params


def from_linen(module: linen.Module, config: Any) -> Target:
    """The target of a Linen module, called as in ``from_nnx``.

    Its params are the module's variables, as ``module.init`` returns them.
    """
    apply = _linen_apply(module)
    return target(apply, config, _if_tapped(module, apply))


@functools.cache
def _nnx_apply(graph) -> Callable:
    return lambda params, *inputs, **taps: nnx.merge(graph, params)(*inputs, **taps)


@functools.cache
def _linen_apply(module: linen.Module) -> Callable:
    return module.apply


def _if_tapped(module: Any, apply: Callable) -> Callable | None:
    takes = inspect.signature(module.__call__).parameters
    return apply if "taps" in takes else None


def _init_cache(batch: int, slots: int, dtype=jnp.float32) -> TokenCache:
    del dtype  # token ids are int32
    return TokenCache(
        tokens=jnp.zeros((batch, slots), jnp.int32), length=jnp.zeros(batch, jnp.int32)
    )


def _score(
    apply: Callable,
    tapped: Callable | None,
    config: Any,
    params: Any,
    cache: TokenCache,
    block: Block,
    *,
    taps: tuple[int, ...] = (),
    rows="all",
) -> Scores:
    """One forward over the cached tokens and a block. See ``types.Target``."""
    batch, nodes = block.token.shape
    if isinstance(rows, str) and rows == "none" and not taps:
        # Ids are all that the cache stores: a prompt is stored without a forward.
        logits = jnp.zeros((batch, 0, config.vocab_size), jnp.float32)
        return Scores(logits, block.token, None)

    tokens, positions, mask = _inputs(cache, block, config.max_position)
    features = None
    if not taps:
        logits = apply(params, tokens, positions, mask)
    elif tapped is None:
        raise ValueError(
            f"the drafter asks for features of layers {taps}, but this Flax model has no "
            "taps; give it a `taps` argument that makes it return (logits, features)"
        )
    else:
        logits, features = tapped(params, tokens, positions, mask, taps=taps)
        features = features[:, -nodes:]
    if logits.shape != (*tokens.shape, config.vocab_size):
        raise ValueError(
            f"the Flax model returned logits of shape {logits.shape} for tokens of "
            f"shape {tokens.shape} and a vocabulary of {config.vocab_size}"
        )
    logits = _pick(logits[:, -nodes:], rows).astype(jnp.float32)
    return Scores(logits, block.token, features)


def _inputs(cache: TokenCache, block: Block, max_position: int):
    """Tokens ``[B, T]``, positions ``[B, T]`` and mask ``[B, T, T]``, T = S + N."""
    batch, nodes = block.token.shape
    slot = jnp.arange(cache.slots)
    is_live = slot < cache.length[:, None]
    within = tree.ancestors(block.parent)

    prefix = (slot <= slot[:, None]) & is_live[:, None, :] | (slot == slot[:, None])
    sees_block = jnp.zeros((batch, cache.slots, nodes), bool)
    sees_prefix = jnp.broadcast_to(is_live[:, None], (batch, nodes, cache.slots))
    mask = jnp.concatenate(
        [
            jnp.concatenate([prefix, sees_block], axis=2),
            jnp.concatenate([sees_prefix, within], axis=2),
        ],
        axis=1,
    )
    positions = jnp.concatenate(
        [
            jnp.where(is_live, slot, 0),
            cache.length[:, None] + tree.depth(within),
        ],
        axis=1,
    )
    # Dead nodes may lie beyond the context, where a position table has no row.
    positions = jnp.minimum(positions, max_position - 1)
    return jnp.concatenate([cache.tokens, block.token], axis=1), positions, mask


def _pick(x: Array, rows) -> Array:
    """The rows of ``x [B, N, V]`` that are wanted."""
    if isinstance(rows, str):
        return {"all": x, "none": x[:, :0]}[rows]
    return jnp.take_along_axis(x, rows[:, None, None], axis=1)
