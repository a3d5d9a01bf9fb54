"""Where block-diffusion drafters begin: at the target's own last layers."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jspec.drafters import block_conv, block_selector, dflash, dspark
from jspec.drafters.block_conv import Convs
from jspec.drafters.dflash_configs import SPECFORGE, ZLAB
from jspec.drafters.diffusion import Design, Weights
from jspec.drafters.published_dflash import BlockHead
from jspec.drafters.tensors import target_head
from jspec.models import Model
from jspec.models.config import Config
from jspec.models.mlp import Mlp
from jspec.models.transformer import Layer
from jspec.train.starts import float32, plain_layers
from jspec.types import Array


def fresh_dflash(
    target: Model,
    taps: tuple[int, ...],
    ids: np.ndarray | None,
    mask_id: int,
    key: Array,
    *,
    layers: int = 2,
    block: int = 8,
) -> BlockHead:
    """The target's last ``layers`` layers, their context made of the last tap.

    Every reader of these drafters has Qwen3's layers, whose queries and keys are normed;
    the norms begin at the size that the target's own have for normed inputs.

    Args:
      taps: features to read; none may be the last layer's output.
      ids: draft vocabulary as target ids, or None for all.
      mask_id: a token that texts do not have.
      layers, block: how many layers, and how many rows a block has.

    Raises:
      ValueError: a target whose layers such a drafter has no place for; taps or a mask
        that are not the target's.
    """
    _check(target, taps, mask_id)
    config = _config(target, layers)
    width = config.hidden
    select = [jnp.zeros((width, width))] * (len(taps) - 1) + [jnp.eye(width)]
    fc = jnp.concatenate(select, 1)
    weights = Weights(
        embed=target.params.embed,
        layers=tuple(_layer(layer, config) for layer in plain_layers(target, layers)),
        head=target_head(target, ids),
        fc=fc + 0.01 * jax.random.normal(key, fc.shape),
        context_norm=jnp.ones(width),
        final_norm=float32(target.params.final_norm),
        to_target=None if ids is None else jnp.asarray(ids),
    )
    design = Design(
        config=config,
        taps=tuple(taps),
        block=block,
        mask_id=mask_id,
        next_token=False,
        causal=(False,) * layers,
        choose=dflash.independent,
    )
    return BlockHead(design, weights, target.config.layers, ZLAB)


def with_selector(head: BlockHead, key: Array, rank: int, count: int = 16) -> BlockHead:
    """DFlash-2 on top of DFlash: convolutions and a selector that say nothing yet."""
    vocab, width = head.weights.embed.shape
    group = next(g for g in (16, 8, 4, 2, 1) if width % g == 0)
    convs = Convs(*(block_conv.init(width, group=group) for _ in range(2)))
    weights = dataclasses.replace(
        head.weights,
        convs=(convs,) * head.design.config.layers,
        joint=block_selector.init(key, vocab, width, rank, count),
    )
    design = dataclasses.replace(head.design, choose=block_selector.selected)
    return dataclasses.replace(head, design=design, weights=weights)


def with_markov(
    head: BlockHead, key: Array, rank: int, link=dspark.vanilla
) -> BlockHead:
    """DSpark on top of DFlash: rows guess the next token, and two heads say nothing yet."""
    weights = head.weights
    vocab, width = weights.embed.shape
    drafted = vocab if weights.to_target is None else len(weights.to_target)
    joint, sure = dspark.init(key, link, vocab, drafted, width, rank)
    design = dataclasses.replace(
        head.design, next_token=True, choose=dspark.left_to_right, link=link
    )
    weights = dataclasses.replace(weights, joint=joint, confidence=sure)
    return dataclasses.replace(head, design=design, weights=weights, layout=SPECFORGE)


def _config(target: Model, layers: int) -> Config:
    """Qwen3 layers of the target's sizes, all with full attention."""
    given = target.config
    return Config(
        family="qwen3",
        vocab_size=given.vocab_size,
        hidden=given.hidden,
        layers=layers,
        heads=given.heads,
        kv_heads=given.kv_heads,
        head_dim=given.head_dim,
        intermediate=given.intermediate,
        norm_eps=given.norm_eps,
        activation=given.activation,
        qk_norm=True,
        query_scale=given.head_dim**-0.5,
        windows=(None,) * layers,
        ropes=given.ropes[-1:] * layers,
        max_position=given.max_position,
        eos_ids=given.eos_ids,
        bos_id=given.bos_id,
    )


def _layer(layer: Layer, config: Config) -> Layer:
    """A target's layer with the norm before attention folded into its products.

    The context is normed once for all layers, so none can keep a norm of its own for it.
    """
    qkv = jnp.asarray(layer.qkv) * layer.attn_norm

    def size(rows: Array) -> Array:
        return jnp.full(config.head_dim, jnp.sqrt(jnp.mean(jnp.sum(rows**2, -1))))

    q_norm, k_norm = layer.q_norm, layer.k_norm
    mlp = Mlp(layer.mlp.gate_up, layer.mlp.down)
    return Layer(
        qkv=qkv,
        out=layer.out,
        mlp=mlp,
        attn_norm=jnp.ones(config.hidden),
        mlp_norm=layer.mlp_norm,
        q_norm=size(qkv[:, :-2]) if q_norm is None else q_norm,
        k_norm=size(qkv[:, -2]) if k_norm is None else k_norm,
    )


def _check(target: Model, taps: tuple[int, ...], mask_id: int) -> None:
    config = target.config
    if not 0 <= mask_id < config.vocab_size:
        raise ValueError(
            f"mask token {mask_id} is not in the vocabulary of {target.name}, which has "
            f"{config.vocab_size} tokens; name one of its unused tokens"
        )
    if not taps or min(taps) < 0 or max(taps) >= config.layers:
        raise ValueError(
            f"taps {list(taps)}; {target.name} has {config.layers} layers, and a drafter "
            f"reads what is there after 0 to {config.layers - 1} of them"
        )
