"""The phases of a round as abstract programs: functions and the shapes they are given.

No array is made: weights, caches and states are shapes. What a phase costs is the business
of ``jspec.predict``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspec import decode, options, tree, verify
from jspec import sampling as smp
from jspec.drafters import dflash, diffusion, dspark, eagle, growth, mtp
from jspec.drafters.eagle_configs import default_taps
from jspec.drafters.ngram import ngram
from jspec.models import architecture
from jspec.models.config import Config
from jspec.state import Params, State
from jspec.types import Block, Context, Drafter, Feedback, Scores, chain

DRAFT_VOCAB = 32000  # of the published EAGLE-3 heads
DTYPE = jnp.bfloat16
BLOCKS = ("dflash", "dspark")  # drafters of whole blocks
DRAFTERS = (*BLOCKS, "eagle3", "mtp", "ngram")
BLOCK_LAYERS = 5  # of the published DFlash and DSpark drafters, which tap as many
MARKOV_RANK = 256  # of the published DSpark drafters
TAPS = dict.fromkeys(BLOCKS, BLOCK_LAYERS) | {"eagle3": 3}


class Setting(NamedTuple):
    """How a round drafts: ``nodes`` with the root, and the longest path ``depth``."""

    nodes: int
    depth: int

    @property
    def name(self) -> str:
        if self.nodes == self.depth + 1:
            return f"chain {self.depth}"
        return f"tree {self.nodes}/{self.depth}"


class Phase(NamedTuple):
    """A function, the shapes it is given, and which argument it may overwrite."""

    call: Callable
    arguments: tuple[Any, ...]
    donated: tuple[int, ...] = ()


class Drafting(NamedTuple):
    """A drafter and the shapes of its weights (None without)."""

    drafter: Drafter
    params: Any


def select(config: Config, ids: tuple[int, ...]) -> Config:
    """The config of these layers under the same embedding, norm and head."""
    experts = config.experts
    if experts is not None:
        dense = tuple(at for at, i in enumerate(ids) if not config.has_experts(i))
        experts = dataclasses.replace(experts, dense_layers=dense)
    return dataclasses.replace(
        config,
        layers=len(ids),
        windows=tuple(config.windows[i] for i in ids),
        ropes=tuple(config.ropes[i] for i in ids),
        experts=experts,
        mtp_layers=0,
    )


@functools.cache
def target_weights(config: Config) -> Any:
    """The shapes of a model's weights: bfloat16, but for routers."""
    init = functools.partial(architecture.init, config, dtype=DTYPE)
    return jax.eval_shape(init, jax.random.key(0))


def drafting(name: str, config: Config, setting: Setting) -> Drafting:
    """A drafter of ``DRAFTERS`` for a target of this config.

    An EAGLE-3 head has a layer of the target's sizes and ``DRAFT_VOCAB`` tokens, as
    published heads have; an MTP module has a layer of the target's last kind and its head;
    DFlash and DSpark have five layers and the target's head.

    Raises:
      ValueError: an unknown name, a tree for a drafter of chains, or a drafter whose
        layers cannot be the target's.
    """
    if name not in DRAFTERS:
        raise ValueError(f"drafter {name!r} is not one of {', '.join(DRAFTERS)}")
    is_chain = setting.nodes == setting.depth + 1
    if name in (*BLOCKS, "ngram") and not is_chain:
        raise ValueError(f"{name} drafts chains, not a {setting.name}")
    if name == "ngram":
        return Drafting(ngram(setting.depth), None)
    if name != "mtp" and (config.experts or config.latent):
        raise ValueError(
            f"a layer of {name} cannot be {config.family}'s; predict with --drafter mtp"
        )
    if name in BLOCKS:
        return _block_drafting(config, setting.depth, is_spark=name == "dspark")
    grower = growth.dynamic(setting.nodes, setting.depth)
    if is_chain:
        grower = growth.chain(setting.depth, dense=False)
    one = select(config, (config.layers - 1,))
    weights = target_weights(one)
    width, layer = config.hidden, weights.layers[0]
    head = weights.embed if weights.head is None else weights.head
    common = dict(
        embed=weights.embed,
        embed_norm=_shape(width),
        hidden_norm=_shape(width),
        final_norm=_shape(width),
    )
    if name == "mtp":
        params = eagle.Weights(
            layers=(layer,), head=head, fc=_shape(width, 2 * width), **common
        )
        drafter = mtp.drafter(mtp.design_of(one), grower, dtype=DTYPE)
        return Drafting(drafter, params)
    qkv = _shape(*layer.qkv.shape[:-1], 2 * width)
    vocab = min(DRAFT_VOCAB, config.vocab_size)
    params = eagle.Weights(
        layers=(dataclasses.replace(layer, qkv=qkv, attn_norm=None),),
        head=_shape(vocab, width),
        fc=_shape(width, 3 * width),
        to_target=_shape(vocab, dtype=jnp.int32),
        **common,
    )
    wanted = default_taps(config.layers)
    taps = tuple(min(max(t, 0), config.layers) for t in wanted)
    design = eagle.Design(one, taps, eagle.eagle3, eagle.fuse)
    return Drafting(eagle.drafter(design, grower, dtype=DTYPE), params)


def _block_drafting(config: Config, gamma: int, *, is_spark: bool) -> Drafting:
    """DFlash or DSpark whose blocks hold just ``gamma`` drafts."""
    count, width, vocab = BLOCK_LAYERS, config.hidden, config.vocab_size
    own = dataclasses.replace(
        select(config, (config.layers - 1,) * count),
        family="qwen3",
        qk_norm=True,
        windows=(None,) * count,
    )
    weights = target_weights(own)
    params = diffusion.Weights(
        embed=weights.embed,
        layers=weights.layers,
        head=weights.embed if weights.head is None else weights.head,
        fc=_shape(width, count * width),
        context_norm=_shape(width),
        final_norm=_shape(width),
    )
    taps = (1 + i * (config.layers - 1) // count for i in range(count))
    design = diffusion.Design(
        config=own,
        taps=tuple(min(tap, config.layers) for tap in taps),
        block=gamma if is_spark else gamma + 1,
        mask_id=0,
        next_token=is_spark,
        causal=(False,) * count,
        choose=dspark.left_to_right if is_spark else dflash.independent,
        link=dspark.vanilla if is_spark else None,
    )
    if is_spark:
        markov = dspark.Markov(_shape(vocab, MARKOV_RANK), _shape(vocab, MARKOV_RANK))
        sure = dspark.Confidence(_shape(1, width + MARKOV_RANK), _shape(1))
        params = dataclasses.replace(params, joint=markov, confidence=sure)
    drafter = dflash.drafter(design, gamma, dense=False, dtype=DTYPE)
    return Drafting(drafter, params)


def state_of(config: Config, drafted: Drafting, batch: int, slots: int) -> State:
    """The shapes of what a batch carries from round to round."""
    start = functools.partial(
        decode.prefill,
        target=architecture.target(config),
        drafter=drafted.drafter,
        slots=slots,
        dtype=DTYPE,
    )
    row = _shape(batch, dtype=jnp.int32)
    tokens = _shape(batch, slots, dtype=jnp.int32)
    params = Params(target_weights(config), drafted.params)
    return jax.eval_shape(start, params, _knobs(config, batch), tokens, row, row)


def of_target(
    config: Config, batch: int, nodes: int, slots: int, taps: int = 0
) -> dict[str, Phase]:
    """``score`` of a block of ``nodes`` and ``append`` of its longest possible path.

    ``taps`` features of the first layers are read: which ones costs nothing.
    """
    target = architecture.target(config)
    block = jax.eval_shape(chain, _shape(batch, nodes, dtype=jnp.int32))
    cache = jax.eval_shape(functools.partial(target.init_cache, batch, slots, DTYPE))
    tapped = tuple(min(i, config.layers) for i in range(taps))
    call = functools.partial(target.score, taps=tapped)
    weights = target_weights(config)
    out: Scores = jax.eval_shape(call, weights, cache, block)
    path = _shape(batch, nodes, dtype=jnp.int32)
    count = _shape(batch, dtype=jnp.int32)
    return {
        "score": Phase(call, (weights, cache, block)),
        "append": Phase(_append, (cache, out.kv, path, count), (0,)),
    }


def of_drafter(config: Config, drafted: Drafting, state: State) -> dict[str, Phase]:
    """``propose``, ``update`` and the ``accept`` between them (greedy: temperature 0)."""
    drafter, params = drafted
    shape = drafter.shape
    given = (state.draft, state.sampling, state.tokens, state.length, state.round)

    def propose(params, draft, sampling, tokens, length, round):
        key, _ = smp.row_keys(sampling, round)
        context = Context(tokens, length, sampling)
        return drafter.propose(params, draft, key, context)

    block, draft = jax.eval_shape(propose, params, *given)
    batch = state.length.shape[0]
    logits = _shape(batch, shape.nodes, config.vocab_size, dtype=jnp.float32)

    # Constants: of a condition that it cannot decide XLA counts both sides, and so
    # penalties and truncations that nobody asked for.
    knobs = _knobs(config, batch)

    def accept(block: Block, logits, state: State):
        mask = tree.ancestors(block.parent)
        law = smp.law(
            logits,
            knobs,
            state.tokens,
            state.length,
            state.start,
            block,
            mask,
        )
        _, key = smp.row_keys(state.sampling, state.round)
        noise = smp.noise(
            key,
            state.sampling,
            state.length,
            shape.nodes,
            shape.depth + 1,
            config.vocab_size,
        )
        rule = verify.default_rule(shape, temperature_is_zero=True)
        verdict = verify.batched(rule)(noise, block, law)
        return dataclasses.replace(verdict, path=verdict.path[:, : shape.depth + 1])

    lean = dataclasses.replace(state, cache=None, draft=None)
    verdict = jax.eval_shape(accept, block, logits, lean)
    width = len(shape.taps) * config.hidden
    features = _shape(batch, shape.nodes, width)
    told = Feedback(block, verdict, logits, features if width else None, state.sampling)
    return {
        "propose": Phase(propose, (params, *given)),
        "update": Phase(drafter.update, (params, draft, told), (1,)),
        "accept": Phase(accept, (block, logits, lean)),
    }


def _knobs(config: Config, batch: int) -> options.Sampling:
    """The options of requests that ask for nothing."""
    return options.options(batch, vocab_size=config.vocab_size, eos_ids=config.eos_ids)


def _append(cache, kv, path, count):
    return cache.append(kv, path, count)


def _shape(*shape: int, dtype: Any = DTYPE) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)
