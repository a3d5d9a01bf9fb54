"""Tensors of published block-diffusion drafters: their names, shapes and places."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jspec.drafters.block_conv import Conv, Convs
from jspec.drafters.block_selector import Selector
from jspec.drafters.dflash_configs import DEEPSPEC, SPECULATORS
from jspec.drafters.diffusion import Design, Weights
from jspec.drafters.domino import Domino, gru
from jspec.drafters.dspark import Confidence, Markov, gated, rnn, vanilla
from jspec.models import Model, names
from jspec.models.names import Place

COPIES = ("embed_tokens.weight", "lm_head.weight")
_CODEBOOKS = (
    "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook",
)
# Other names of the same tensors.
_ALIASES = {
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
    **{f"{name}.weight": name for name in _CODEBOOKS},
}
# Domino.after, mix, enter, stay
_DOMINO = (
    "embed_proj.2.weight",
    "embed_proj.0.weight",
    "prefix_gru.weight_ih_l0",
    "prefix_gru.weight_hh_l0",
)
_MIX: dict[Any, str] = {gated: "markov_head.gate_proj", rnn: "markov_head.joint_proj"}


def renamed(key: str) -> str:
    """The name a tensor has here; some loaders and older files have others."""
    key = key.removeprefix("model.").removeprefix("logit_head.")
    return _ALIASES.get(key, key)


def table(design: Design) -> dict[str, Place]:
    """Key -> place in ``Weights`` of the layers and norms."""
    width = (design.config.hidden,)
    table = {
        f"layers.{i}.{name}": place
        for i in range(design.config.layers)
        for name, place in names.of_layer(design.config, i).items()
    }
    table["hidden_norm.weight"] = names.whole(("context_norm",), width)
    table["norm.weight"] = names.whole(("final_norm",), width)
    return table


def shapes(design: Design, layout: str, found: dict, target: Model):
    """Key -> shape of every tensor of the folder, and the keys that may be missing."""
    config, vocab = design.config, target.config.vocab_size
    width = config.hidden
    shapes = {key: place.shape for key, place in table(design).items()}
    shapes["fc.weight"] = (width, len(design.taps) * target.config.hidden)
    reduced = vocab
    if "d2t" in found:
        reduced = len(found["d2t"])
        shapes |= {
            "d2t": (reduced,),
            "t2d": (vocab,),
            "lm_head.weight": (reduced, width),
        }
    if layout == DEEPSPEC:
        shapes |= dict.fromkeys(COPIES, (vocab, width))
    shapes |= _conv_shapes(design, found) | _joint_shapes(design, found, vocab, reduced)
    return shapes, frozenset({"t2d", *(COPIES if layout == DEEPSPEC else ())})


def _conv_shapes(design: Design, found: dict) -> dict:
    """Of convolutions; their number of taps and groups is read off the first."""
    if "layers.0.attention_conv.base_kernel" not in found:
        return {}
    base = found["layers.0.attention_conv.base_kernel"].shape
    kernel = found.get("layers.0.attention_conv.kernel_projection.weight", base).shape
    return {
        f"layers.{i}.{part}.{name}": shape
        for i in range(design.config.layers)
        for part in ("attention_conv", "mlp_conv")
        for name, shape in (
            ("base_kernel", (2, base[1], design.config.hidden)),
            ("kernel_projection.weight", (kernel[0], design.config.hidden)),
        )
    }


def _joint_shapes(design: Design, found: dict, vocab: int, reduced: int) -> dict:
    """Of the selector, or of the Markov and confidence heads, whose rank is read off."""
    width, out = design.config.hidden, {}
    if _CODEBOOKS[0] in found:
        rank = found[_CODEBOOKS[0]].shape[-1]
        out |= dict.fromkeys(_CODEBOOKS, (vocab, rank))
        out["candidate_selector.hidden_projection.weight"] = (rank, width)
    rank = 0
    if design.link is gru:
        stay = found.get("prefix_gru.weight_hh_l0", np.zeros((0, 0)))
        code = len(found.get("embed_proj.0.weight", ()))
        state = stay.shape[-1]
        shapes = (
            (vocab, code),
            (code, width + state),
            (3 * state, width),
            (3 * state, state),
        )
        out |= dict(zip(_DOMINO, shapes, strict=True))
    elif design.link is not None:
        w1, w2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
        rank = found[w1].shape[-1] if w1 in found else 0
        out |= {w1: (vocab, rank), w2: (reduced, rank)}
        if design.link in _MIX:
            name = _MIX[design.link]
            rows, reads = (1, 1) if design.link is gated else (3, 2)
            out[f"{name}.weight"] = (rows * rank, reads * rank + width)
            out[f"{name}.bias"] = (rows * rank,)
    if "confidence_head.proj.weight" in found:
        wide = found["confidence_head.proj.weight"].shape[-1] > width
        out["confidence_head.proj.weight"] = (1, width + rank * wide)
        if "confidence_head.proj.bias" in found:
            out["confidence_head.proj.bias"] = (1,)
    return out


def joint(design: Design, layout: str, get, ids, given: dict, embed):
    """What joins a block's guesses; ``get`` gives an array by its key, or None.

    Args:
      ids: target ids of a draft vocabulary, or None.
      given: the config, whose fields no tensor tells.
      embed: the target's embedding.
    """

    def drafted(after):
        own = layout == SPECULATORS or ids is None
        return after if own else after[jnp.asarray(ids)]

    if get(_CODEBOOKS[0]) is not None:
        before, after = map(get, _CODEBOOKS)
        project = get("candidate_selector.hidden_projection.weight")
        count = given.get("selector_top_k", 16)
        return Selector(before, after, project, count=count)
    if design.link is None:
        return None
    if design.link is gru:
        after, *others = map(get, _DOMINO)
        pure = given.get("pure_draft_prefix_len", 0)
        return Domino(embed, drafted(after), *others, pure=pure)
    after = drafted(get("markov_head.markov_w2.weight"))
    name = _MIX.get(design.link, "")
    mix = get(f"{name}.weight"), get(f"{name}.bias")
    return Markov(get("markov_head.markov_w1.weight"), after, *mix)


def confidence(get) -> Confidence | None:
    """The confidence head, without temperatures."""
    weight = get("confidence_head.proj.weight")
    if weight is None:
        return None
    return Confidence(weight, get("confidence_head.proj.bias"))


def convs(design: Design, get) -> tuple[Convs, ...]:
    """Convolutions of every layer, or none."""

    def conv(i: int, part: str) -> Conv:
        name = f"layers.{i}.{part}"
        return Conv(get(f"{name}.base_kernel"), get(f"{name}.kernel_projection.weight"))

    if get("layers.0.attention_conv.base_kernel") is None:
        return ()
    layers = range(design.config.layers)
    return tuple(Convs(conv(i, "attention_conv"), conv(i, "mlp_conv")) for i in layers)


def conv_tensors(weights: Weights) -> dict[str, np.ndarray]:
    """Key -> array of the convolutions."""
    return {
        f"layers.{i}.{part}.{name}": np.asarray(array)
        for i, pair in enumerate(weights.convs)
        for part, conv in (("attention_conv", pair.attention), ("mlp_conv", pair.mlp))
        for name, array in (
            ("base_kernel", conv.base),
            ("kernel_projection.weight", conv.kernel),
        )
    }


def joint_tensors(design: Design, weights: Weights, layout: str) -> dict:
    """Key -> array of selector, Markov and confidence heads."""
    head, sure, out = weights.joint, weights.confidence, {}
    if isinstance(head, Selector):
        out |= dict(zip(_CODEBOOKS, (head.predecessor, head.successor), strict=True))
        out["candidate_selector.hidden_projection.weight"] = head.project
    after = None
    if isinstance(head, (Markov, Domino)):
        after, ids = np.asarray(head.after), weights.to_target
        if layout != SPECULATORS and ids is not None:
            # Readers that know no draft vocabulary expect a row for every token.
            whole = np.zeros((weights.embed.shape[0], after.shape[1]), after.dtype)
            whole[np.asarray(ids)] = after
            after = whole
    if isinstance(head, Domino):
        arrays = after, head.mix, head.enter, head.stay
        out |= dict(zip(_DOMINO, arrays, strict=True))
    if isinstance(head, Markov):
        out["markov_head.markov_w1.weight"] = head.before
        out["markov_head.markov_w2.weight"] = after
        if design.link in _MIX:
            out[f"{_MIX[design.link]}.weight"] = head.mix
            out[f"{_MIX[design.link]}.bias"] = head.mix_bias
    if sure is not None:
        out["confidence_head.proj.weight"] = sure.weight
        if sure.bias is not None:
            out["confidence_head.proj.bias"] = sure.bias
    return {key: np.asarray(array) for key, array in out.items()}


def facts(design: Design, weights: Weights) -> dict[str, Any]:
    """Sizes and kinds of the parts that configs name."""
    head, sure, found = weights.joint, weights.confidence, {}
    if weights.convs:
        base, kernel = (
            weights.convs[0].attention.base,
            weights.convs[0].attention.kernel,
        )
        _, taps, width = base.shape
        found["conv_kernel_size"] = taps
        found["conv_group_size"] = width // (kernel.shape[0] // (2 * taps))
    if isinstance(head, Selector):
        found["selector_rank"] = head.predecessor.shape[1]
        found["selector_top_k"] = head.count
    if isinstance(head, Domino):
        found["emb_dim"], found["gru_hidden_dim"] = len(head.mix), head.stay.shape[1]
        found["pure_draft_prefix_len"] = head.pure
    if isinstance(head, Markov):
        found["markov_rank"] = head.before.shape[1]
        found["markov_head_type"] = (design.link or vanilla).__name__
        found["enable_confidence_head"] = sure is not None
        wide = sure is not None and sure.weight.shape[-1] > design.config.hidden
        found["confidence_head_with_markov"] = wide
    return found
