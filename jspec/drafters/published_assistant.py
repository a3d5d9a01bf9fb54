"""Gemma 4 assistants in transformers' layout (``Gemma4AssistantForCausalLM``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jspec import checks
from jspec.drafters import tensors
from jspec.drafters.assistant import Design, Layer, Weights
from jspec.models import Model
from jspec.models.config import Config, Rope
from jspec.models.hf_rope import unsupported
from jspec.models.mlp import Mlp

_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
_SLIDING, _FULL = "sliding_attention", "full_attention"
_ROPES = {
    _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    _FULL: {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1_000_000.0,
    },
}


class Assistant(NamedTuple):
    """An assistant joined to its target."""

    design: Design
    weights: Weights


def is_assistant(config: dict) -> bool:
    """Does a ``config.json`` look like that of a Gemma 4 assistant?"""
    return config.get("model_type") in _TYPES


def load_assistant(folder: str | Path, target: Model) -> Assistant:
    """The assistant in a folder, for a target with sliding and full layers.

    The layers of each kind read the target's last layer of that kind.

    Raises:
      FileNotFoundError: no config or no weights.
      ValueError: a config that asks for something else, missing or unexpected tensors,
        or sizes that are not the target's, naming both.
    """
    folder = Path(folder)
    hf = tensors.read_config(folder)
    text = hf.get("text_config") or {}
    kinds = _kinds(text)
    config = _config(folder, text, kinds)
    dims = [_head_dim(text, i, kind) for i, kind in enumerate(kinds)]
    _check_target(folder, hf, config, target)
    sources = tuple(_source(folder, kind, target) for kind in kinds)
    for layer, dim in enumerate(dims):
        if dim != target.config.head_dim:
            raise ValueError(
                f"{folder}: heads of layer {layer} have size {dim}, the keys of "
                f"{target.name} {target.config.head_dim}"
            )
    clusters, per_token = _clusters(folder, hf, config.vocab_size)
    shapes = _shapes(config, target.config.hidden, dims, clusters)
    kept = tensors.take(
        folder, tensors.read_tensors(folder), shapes, frozenset({"lm_head.weight"})
    )
    design = Design(config, sources, target.config.embed_scale, per_token)
    return Assistant(design, _weights(kept, config, dims, clusters, target))


def _kinds(text: dict) -> list[str]:
    kinds = text.get("layer_types")
    if not kinds or set(kinds) - {_SLIDING, _FULL}:
        raise unsupported("layer_types", kinds, f"a list of {_SLIDING}, {_FULL}")
    return kinds


def _config(folder: Path, text: dict, kinds: list[str]) -> Config:
    """What an assistant's layers are, from its ``text_config``."""
    neither = ("hidden_size_per_layer_input", "enable_moe_block", "attention_bias")
    for key in (*neither, "use_double_wide_mlp", "final_logit_softcapping"):
        if text.get(key):
            raise unsupported(key, text[key], "none")
    names = ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size")
    absent = [key for key in names if key not in text]
    if absent:
        raise ValueError(f"text_config in {folder}/config.json lacks {absent}")
    vocab, hidden, heads, wide = (
        checks.count(f"{folder}: {key}", text[key], 1) for key in names
    )
    window = int(text.get("sliding_window") or 512) + 1  # transformers counts both ends
    said = text.get("rope_parameters") or {}
    ropes = {kind: _rope(said.get(kind) or _ROPES[kind]) for kind in set(kinds)}
    return Config(
        family="gemma4_assistant",
        vocab_size=vocab,
        hidden=hidden,
        layers=len(kinds),
        heads=heads,
        kv_heads=1,
        head_dim=1,
        intermediate=wide,
        norm_eps=float(text.get("rms_norm_eps", 1e-6)),
        activation=text.get("hidden_activation", "gelu_pytorch_tanh"),
        windows=tuple(window if kind == _SLIDING else None for kind in kinds),
        ropes=tuple(ropes[kind] for kind in kinds),
    )


def _rope(settings: dict) -> Rope:
    kind, theta = settings.get("rope_type", "default"), float(settings["rope_theta"])
    if kind == "default":
        return Rope(theta)
    if kind == "proportional":
        share = float(settings.get("partial_rotary_factor", 1.0))
        return Rope(theta, kind, float(settings.get("factor", 1.0)), fraction=share)
    raise unsupported("rope_type", kind, ("default", "proportional"))


def _head_dim(text: dict, layer: int, kind: str) -> int:
    """Newer configs list the layers that differ, older ones name the full layers' size."""
    if "per_layer_config" in text:
        own = text["per_layer_config"].get(str(layer), {})
        return int(own.get("head_dim", text.get("head_dim", 256)))
    if kind == _FULL:
        return int(text.get("global_head_dim", 512))
    return int(text.get("head_dim", 256))


def _check_target(folder: Path, hf: dict, config: Config, target: Model) -> None:
    theirs = hf.get("backbone_hidden_size", 1536), config.vocab_size
    ours = target.config.hidden, target.config.vocab_size
    if theirs != ours:
        raise ValueError(
            f"{folder} was made for a target of width {theirs[0]} with {theirs[1]} "
            f"tokens, but {target.name} has width {ours[0]} and {ours[1]} tokens"
        )


def _source(folder: Path, kind: str, target: Model) -> int:
    """The target's last layer of a kind."""
    if target.config.latent is not None:
        raise ValueError(
            f"{target.name} stores latents; {folder} reads keys and values"
        )
    sliding = [w is not None for w in target.config.windows]
    found = [i for i, s in enumerate(sliding) if s == (kind == _SLIDING)]
    if not found:
        raise ValueError(f"{folder} reads a {kind} layer; {target.name} has none")
    return found[-1]


def _clusters(folder: Path, hf: dict, vocab_size: int) -> tuple[int, int]:
    """How many clusters of tokens there are and how many are looked into; (0, 0): none."""
    if not hf.get("use_ordered_embeddings"):
        return 0, 0
    count = checks.count("num_centroids", hf.get("num_centroids", 2048), 1)
    kept = hf.get("centroid_intermediate_top_k", 32)
    checks.count("centroid_intermediate_top_k", kept, 1)
    if vocab_size % count or kept > count:
        raise ValueError(
            f"{folder}: {vocab_size} tokens in {count} clusters, {kept} of them looked "
            "into; clusters must be equal, and as many"
        )
    return count, kept


_NORMS = {
    "attn_norm": "input_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def _shapes(config: Config, wide: int, dims: list[int], clusters: int) -> dict:
    """Every tensor of the layout; ``wide`` is the target's width."""
    m, inner, vocab = config.hidden, config.intermediate, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, m),
        "lm_head.weight": (vocab, m),
        "model.norm.weight": (m,),
        "pre_projection.weight": (m, 2 * wide),
        "post_projection.weight": (wide, m),
    }
    if clusters:
        shapes["masked_embedding.centroids.weight"] = (clusters, m)
        shapes["masked_embedding.token_ordering"] = (vocab,)
    for i, dim in enumerate(dims):
        at = f"model.layers.{i}"
        shapes |= {f"{at}.{name}.weight": (m,) for name in _NORMS.values()}
        shapes |= {
            f"{at}.layer_scalar": (1,),
            f"{at}.self_attn.q_proj.weight": (config.heads * dim, m),
            f"{at}.self_attn.q_norm.weight": (dim,),
            f"{at}.self_attn.o_proj.weight": (m, config.heads * dim),
            f"{at}.mlp.gate_proj.weight": (inner, m),
            f"{at}.mlp.up_proj.weight": (inner, m),
            f"{at}.mlp.down_proj.weight": (m, inner),
        }
    return shapes


def _weights(
    kept: dict[str, np.ndarray],
    config: Config,
    dims: list[int],
    clusters: int,
    target: Model,
) -> Weights:
    def array(name: str) -> jnp.ndarray:
        return jnp.asarray(kept[name], target.dtype)

    def layer(i: int) -> Layer:
        at = f"model.layers.{i}"
        both = [array(f"{at}.mlp.{x}_proj.weight") for x in ("gate", "up")]
        query = array(f"{at}.self_attn.q_proj.weight")
        norms: dict[str, Any] = {
            name: array(f"{at}.{stored}.weight") for name, stored in _NORMS.items()
        }
        return Layer(
            query=query.reshape(config.heads, dims[i], -1),
            out=array(f"{at}.self_attn.o_proj.weight"),
            mlp=Mlp(jnp.stack(both), array(f"{at}.mlp.down_proj.weight")),
            q_norm=array(f"{at}.self_attn.q_norm.weight"),
            scale=array(f"{at}.layer_scalar"),
            **norms,
        )

    tied = "lm_head.weight" not in kept
    members = None
    if clusters:
        order = kept["masked_embedding.token_ordering"]
        members = jnp.asarray(order.reshape(clusters, -1), jnp.int32)
    return Weights(
        embed=target.params.embed,
        enter=array("pre_projection.weight"),
        leave=array("post_projection.weight"),
        layers=tuple(layer(i) for i in range(config.layers)),
        final_norm=array("model.norm.weight"),
        head=array("model.embed_tokens.weight" if tied else "lm_head.weight"),
        centroids=array("masked_embedding.centroids.weight") if clusters else None,
        members=members,
    )
