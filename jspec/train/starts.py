"""Where training begins: heads made of the target's own last layer, norm and head.

Such a head needs a few hundred steps to what a random one needs thousands for.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.drafters import eagle
from jspec.drafters.eagle import Design, Weights
from jspec.drafters.mtp import design_of
from jspec.drafters.published_eagle import Head
from jspec.drafters.published_mtp import Modules
from jspec.drafters.tensors import target_head
from jspec.models import Model, architecture
from jspec.models.config import Config, Rope
from jspec.train.draft_rows import draft_rows
from jspec.train.features import extract
from jspec.types import Array


def fresh_eagle3(target: Model, taps, ids: np.ndarray, key: Array) -> Head:
    """The target's last layer reading the last tap, blind to the embedding at first.

    Raises:
      ValueError: a target whose layers no EAGLE head has a place for.
    """
    layer, config = _plain_layer(target)
    width = config.hidden
    select = jnp.concatenate(
        [jnp.zeros((width, (len(taps) - 1) * width)), jnp.eye(width)], 1
    )
    qkv = jnp.concatenate([jnp.zeros_like(layer.qkv), layer.qkv], -1)
    noise = 0.01 * jax.random.normal(key, qkv.shape)
    weights = Weights(
        embed=target.params.embed,
        layers=(dataclasses.replace(layer, qkv=qkv + noise, attn_norm=None),),
        head=target_head(target, ids),
        fc=select,
        embed_norm=_neutral(config),
        hidden_norm=layer.attn_norm,
        final_norm=target.params.final_norm,
        to_target=jnp.asarray(ids),
    )
    return Head(Design(config, tuple(taps), eagle.eagle3, eagle.fuse), weights)


def with_vocabulary(head: Head, target: Model, ids: np.ndarray) -> Head:
    """An EAGLE-3 head over other tokens: its own rows where it has them, or the target's."""
    own, wanted = float32(head.weights.head), jnp.asarray(ids)
    at, known = draft_rows(wanted, head.weights.to_target, len(own))
    rows = jnp.where(known[:, None], own[at], target_head(target, ids))
    weights = dataclasses.replace(head.weights, head=rows, to_target=wanted)
    return Head(head.design, weights)


def fresh_eagle1(target: Model, key: Array) -> Head:
    """``fc`` passes the feature on; the layer begins as the target's last.

    That layer works on the target's stream, the head on its normed features: the final
    norm's gain is taken out of what the layer reads, and what it adds is brought to the
    features' size.

    Raises:
      ValueError: as ``fresh_eagle3``.
    """
    layer, config = _plain_layer(target)
    width, gain = config.hidden, _gain(target, target.params.final_norm)
    size = jnp.sqrt(jnp.mean(gain**2))
    added = (gain / _stream_size(target))[:, None]
    layer = dataclasses.replace(
        layer,
        qkv=layer.qkv * (_gain(target, layer.attn_norm) / gain),
        out=layer.out * added,
        mlp=dataclasses.replace(layer.mlp, down=layer.mlp.down * added),
        attn_norm=None,
        mlp_norm=_gain(target, layer.mlp_norm) * size / gain - config.zero_centred,
    )
    fc = jnp.concatenate([jnp.zeros((width, width)), jnp.eye(width)], 1)
    weights = Weights(
        embed=target.params.embed,
        layers=(layer,),
        head=target_head(target),
        fc=fc + 0.01 * jax.random.normal(key, fc.shape),
        fc_bias=jnp.zeros(width),
    )
    return Head(Design(config, (-1,), eagle.eagle1, eagle.as_is), weights)


def fresh_mtp(target: Model, key: Array) -> Modules:
    """``fc`` makes the target's stream of its features; the layer begins as its last."""
    layer, config = _last_layer(target)
    width, gain = config.hidden, _gain(target, target.params.final_norm)
    scale = _stream_size(target) * jnp.sqrt(jnp.mean(gain**2)) / gain
    fc = jnp.concatenate([jnp.zeros((width, width)), jnp.diag(scale)], 1)
    weights = Weights(
        embed=target.params.embed,
        layers=(layer,),
        head=target_head(target),
        fc=fc + 0.01 * jax.random.normal(key, fc.shape),
        embed_norm=_neutral(config),
        hidden_norm=_neutral(config),
        final_norm=float32(target.params.final_norm),
    )
    return Modules(design_of(config), (weights,))


def fresh_small(
    target: Model, key: Array, *, hidden: int, layers: int, head_dim: int
) -> Model:
    """A small Llama over the target's tokens, tied, one key/value head, random layers.

    Its embedding is the target's, projected on the directions in which that varies most.

    Raises:
      ValueError: ``hidden`` is not a multiple of ``head_dim`` or exceeds the target's.
    """
    given = target.config
    if hidden % head_dim or hidden > given.hidden:
        raise ValueError(
            f"hidden {hidden} must be a multiple of head_dim {head_dim} and at most the "
            f"target's {given.hidden}"
        )
    config = Config(
        family="llama",
        vocab_size=given.vocab_size,
        hidden=hidden,
        layers=layers,
        heads=hidden // head_dim,
        kv_heads=1,
        head_dim=head_dim,
        intermediate=-(-hidden * 8 // 3 // 64) * 64,
        tie_embeddings=True,
        query_scale=head_dim**-0.5,
        windows=(None,) * layers,
        ropes=(Rope(),) * layers,
        max_position=given.max_position,
        eos_ids=given.eos_ids,
        bos_id=given.bos_id,
    )
    params = architecture.init(config, key)
    embed = np.asarray(target.params.embed, np.float32)
    _, directions = np.linalg.eigh(embed.T @ embed)  # ascending
    projected = jnp.asarray(embed @ directions[:, -hidden:])
    params = dataclasses.replace(params, embed=projected)
    return Model(
        name=f"{target.name}-small",
        target=architecture.target(config),
        params=params,
        tokenizer=target.tokenizer,
        dtype=jnp.dtype(jnp.float32),
    )


def plain_layers(
    target: Model, count: int, kind: str = "a DFlash drafter"
) -> list[Any]:
    """Float32 copies of the last ``count`` layers of a target.

    Raises:
      ValueError: they have what drafters of this kind have no place for, or there are
        not so many.
    """
    config = target.config
    if not 1 <= count <= config.layers:
        raise ValueError(f"{count} layers of {target.name}, which has {config.layers}")
    last = range(config.layers - count, config.layers)
    odd = {
        "norms after attention and MLP": config.sandwich_norm,
        "experts": any(config.has_experts(i) for i in last),
        "latent attention": config.latent is not None,
        "gated attention": config.gated,
    }
    has = [name for name, given in odd.items() if given]
    if has:
        raise ValueError(
            f"{target.name} has {' and '.join(has)}, which the layer of {kind} has no "
            "place for; train another kind of head (mtp), or go on from a head that "
            "exists"
        )
    return [float32(target.params.layers[i]) for i in last]


def _plain_layer(target: Model) -> tuple[Any, Config]:
    """The last layer of a target that an EAGLE head can be made of."""
    plain_layers(target, 1, "an EAGLE head")
    return _last_layer(target)


def _gain(target: Model, weight: Array) -> Array:
    """What a norm with this weight multiplies by, away from 0 so that it can be undone."""
    gain = jnp.asarray(weight, jnp.float32) + target.config.zero_centred
    return jnp.where(jnp.abs(gain) < 0.01, 0.01, gain)


def _stream_size(target: Model) -> Array:
    """Root mean square of what leaves the last layer, the median over random tokens."""
    config, count = target.config, 32
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, count))
    found = extract(
        target.params,
        jnp.asarray(tokens, jnp.int32),
        jnp.zeros((1, count), jnp.int32),
        jnp.arange(count)[None],
        target=target.target,
        taps=(config.layers,),
    )
    assert found.taps is not None
    return jnp.median(jnp.sqrt(jnp.mean(found.taps**2, -1)))


def _neutral(config: Config) -> Array:
    """Weights of a norm that scales nothing."""
    return jnp.full(config.hidden, 0.0 if config.zero_centred else 1.0)


def _last_layer(target: Model) -> tuple[Any, Config]:
    """A float32 copy of the target's last layer, and the config of a single such layer."""
    config, last = target.config, target.config.layers - 1
    experts = config.experts
    if experts is not None:
        dense = () if config.has_experts(last) else (0,)
        experts = dataclasses.replace(experts, dense_layers=dense)
    config = dataclasses.replace(
        config,
        layers=1,
        windows=(None,),
        ropes=config.ropes[-1:],
        experts=experts,
        mtp_layers=0,
    )
    return float32(target.params.layers[-1]), config


def float32(tree: Any) -> Any:
    """A float32 copy."""
    return jax.tree.map(lambda x: jnp.array(x, jnp.float32), tree)
