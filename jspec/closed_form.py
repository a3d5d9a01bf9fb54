"""What the phases of a round cost by arithmetic over the sizes, for any chip."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jspec import phases, roofline
from jspec.models.config import Config
from jspec.phases import Setting

SLACK = 128  # slots beyond the cached tokens: room for a block
GUESSES = 10  # children of a node that a predicted tree may have


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a program costs one device.

    Attributes:
      flops: floating-point operations.  moved: bytes read and written.
      seconds: XLA's estimate, None where there is none.
      memory: bytes of its arguments, results and temporaries.
    """

    flops: float = 0.0
    moved: float = 0.0
    seconds: float | None = 0.0
    memory: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        known = self.seconds is not None and other.seconds is not None
        return Cost(
            self.flops + other.flops,
            self.moved + other.moved,
            self.seconds + other.seconds if known else None,  # type: ignore[operator]
            self.memory + other.memory,
        )

    def __mul__(self, factor: float) -> Cost:
        seconds = None if self.seconds is None else self.seconds * factor
        return Cost(
            self.flops * factor, self.moved * factor, seconds, self.memory * factor
        )

    def bound(self, chip: roofline.Chip) -> float:
        """Seconds on the roofline."""
        return roofline.roofline_seconds(self.flops, self.moved, chip)


def arithmetic(
    config: Config,
    drafter: str,
    setting: Setting | None,
    batch: int,
    length: int,
    devices: int,
) -> dict[str, Cost]:
    """The costs of every phase in closed form, split evenly over the devices.

    FLOPs: two a multiply-add of every product, attention of each row to the cache and to
    the block. Bytes: weights once a forward (of experts those that some row is expected to
    choose, of an embedding nothing), the live cache, logits. Activations stay on the chip.
    """
    nodes = 1 if setting is None else setting.nodes
    weights = phases.target_weights(config)
    head = weights.embed if weights.head is None else weights.head
    memory = _bytes(weights) + _cache_bytes(config, batch, length + SLACK, full=True)
    drafted = None
    if setting is not None:
        drafted = phases.drafting(drafter, config, setting).params
    own = None if drafted is None else dataclasses.replace(drafted, embed=None)
    if own is not None and own.head.shape == head.shape:
        memory -= _bytes(head)  # the same array
    memory += _bytes(own)
    rows = batch * nodes
    score = _forward(config, weights.layers, batch, nodes, length)
    score += _product(head, rows)
    logits = 4.0 * rows * config.vocab_size
    score += Cost(0, logits)
    kv = _cache_bytes(config, batch, nodes, full=True)
    costs = {
        "score": score,
        "append": Cost(0, 2 * kv),
        "accept": Cost(rows * config.vocab_size, logits),
        "propose": Cost(),
        "update": Cost(),
    }
    if own is not None and setting is not None:
        drafting = _block_costs if drafter in phases.BLOCKS else _token_costs
        costs |= drafting(config, own, setting, batch, length)
    return {
        name: Cost(c.flops / devices, c.moved / devices, None, memory / devices)
        for name, c in costs.items()
    }


def _token_costs(
    config: Config, own, setting: Setting, batch: int, length: int
) -> dict[str, Cost]:
    """``propose`` and ``update`` of a head that drafts level by level."""
    layer = phases.select(config, (config.layers - 1,))

    def step(wide: int) -> Cost:
        forward = _forward(layer, own.layers, batch, wide, length)
        return forward + _product(own.fc, batch * wide)

    wide = 1 if setting.nodes == setting.depth + 1 else GUESSES
    # The first guesses come from the pair that `update` left.
    propose = _product(own.head, batch)
    propose += (step(wide) + _product(own.head, batch * wide)) * (setting.depth - 1)
    return {"propose": propose, "update": step(setting.depth + 1)}


def _block_costs(
    config: Config, own, setting: Setting, batch: int, length: int
) -> dict[str, Cost]:
    """``propose`` and ``update`` of a drafter of blocks: one forward, and its context."""
    layers, gamma = len(own.layers), setting.depth
    config = phases.select(config, (config.layers - 1,) * layers)
    config = dataclasses.replace(config, windows=(None,) * layers)
    rows = gamma if own.joint is not None else gamma + 1
    propose = _forward(config, own.layers, batch, rows, length)
    propose += _product(own.head, batch * gamma)
    if own.joint is not None:
        propose += _product(own.joint.after, batch) * gamma
    kv = 2 * config.kv_heads * config.head_dim * config.hidden * layers
    tokens = batch * (gamma + 1)
    context = Cost(2.0 * kv * tokens, kv * jnp.dtype(phases.DTYPE).itemsize)
    stored = Cost(0, _cache_bytes(config, batch, gamma + 1))
    return {
        "propose": propose,
        "update": _product(own.fc, tokens) + context + stored,
    }


def _forward(config: Config, layers, batch: int, nodes: int, length: int) -> Cost:
    """The layers of a model on ``nodes`` rows a sequence, embedding and head left out."""
    rows, total = batch * nodes, Cost()
    for leaf, path in _leaves(layers):
        share = chosen = 1.0
        experts = config.experts
        if experts is not None and _is_expert(path, leaf, experts.count):
            chosen = experts.per_token / experts.count
            share = 1 - (1 - chosen) ** rows
        flops = 2.0 * leaf.size * chosen * rows if len(leaf.shape) > 1 else 0.0
        total += Cost(flops, _bytes(leaf) * share)
    pair = 4.0 * config.heads * config.head_dim
    if config.latent is not None:
        pair = 2.0 * config.heads * (2 * config.latent.rank + config.latent.rope_dim)
    seen = [length if w is None else min(length, w) for w in config.windows]
    pairs = sum(rows * (s + nodes) for s in seen)
    return total + Cost(pair * pairs, _cache_bytes(config, batch, length))


def _cache_bytes(config: Config, batch: int, tokens: int, full: bool = False) -> float:
    """Bytes of ``tokens`` cached tokens; ``full`` counts those beyond windows too."""
    one = 2 * config.kv_heads * config.head_dim
    if config.latent is not None:
        one = config.latent.rank + config.latent.rope_dim
    seen = [tokens if w is None or full else min(tokens, w) for w in config.windows]
    return float(batch * sum(seen) * one * jnp.dtype(phases.DTYPE).itemsize)


def _product(weight, rows: int) -> Cost:
    return Cost(2.0 * weight.size * rows, _bytes(weight))


def _leaves(tree_: Any):
    for path, leaf in jax.tree.leaves_with_path(tree_):
        yield leaf, [getattr(key, "name", None) for key in path]


def _is_expert(path: list, leaf, count: int) -> bool:
    stacked = path[-1] in ("gate_up", "down") and len(leaf.shape) > 2
    return stacked and "shared" not in path and leaf.shape[0] == count


def _bytes(tree_: Any) -> float:
    leaves = jax.tree.leaves(tree_)
    return float(sum(x.size * x.dtype.itemsize for x in leaves))
