"""Where each checkpoint tensor lives in ``Weights``: one table, read in both directions.

Checkpoints keep transformers' names and one tensor per projection; ``Weights`` fuses
the projections that read the same input, and the experts of a layer. A ``Place`` is a
view of the fused array.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from jspec.models import deepseek, transformer
from jspec.models.config import Config, Experts
from jspec.models.deepseek import latent_sizes
from jspec.models.hf_families import GATED
from jspec.models.mlp import Mlp
from jspec.models.moe import Moe
from jspec.models.transformer import Weights

Path = tuple[str | int, ...]
Shape = tuple[int, ...]

# Arrays that are float32 in every model: rounding them would send tokens elsewhere.
FLOAT32 = ("router", "correction")

# Arrays of a layer, ``[*lead, in]``, that one product with ``linear`` reads, and their
# axes: those of experts have one more.
PRODUCTS = {"qkv": 4, "out": 2, "gate_up": 3, "down": 2}


def dtype_of(path: Path, dtype) -> np.dtype:
    """The dtype of an array of a model whose weights are of ``dtype``.

    Norms, whose dtype is that of the residual stream, are float32 on a CPU: it computes in
    float32 whatever a stream is of, and would only convert there and back.
    """
    norm = str(path[-1]).endswith("norm") and jax.default_backend() == "cpu"
    return np.dtype(np.float32 if norm or path[-1] in FLOAT32 else dtype)


class Place(NamedTuple):
    """One checkpoint tensor inside one array of ``Weights``.

    Attributes:
      path: ``("embed",)``, ``("final_norm",)``, ``("head",)`` or ``("layers", i, *fields)``.
      index: basic index into that array; ``()`` is all of it.
      shape: the tensor's shape in the checkpoint, a reshape of ``array[index]``.
      array: the array's own shape.
    """

    path: Path
    index: tuple
    shape: Shape
    array: Shape


def whole(path: Path, shape: Shape) -> Place:
    """The place of a tensor that is an array of its own."""
    return Place(path, (), shape, shape)


class Stem(NamedTuple):
    """One kind of tensor of a layer.

    Attributes:
      field: of the layer, dotted where it is nested.
      index, shape: as in ``Place``.
      array: the array's shape; None is ``shape``.
      bias: is there a bias of shape ``shape[:1]`` in an array of shape ``array[:-1]``?
    """

    field: str
    index: tuple
    shape: Shape
    array: Shape | None = None
    bias: bool = False


def places(config: Config) -> dict[str, Place]:
    """Checkpoint key -> place, for every tensor a model of this config has."""
    table = (config.vocab_size, config.hidden)
    out = {
        "model.embed_tokens.weight": whole(("embed",), table),
        "model.norm.weight": whole(("final_norm",), (config.hidden,)),
    }
    if not config.tie_embeddings:
        out["lm_head.weight"] = whole(("head",), table)
    for i in range(config.layers):
        for name, place in of_layer(config, i).items():
            out[f"model.layers.{i}.{name}"] = place
    return out


def of_layer(config: Config, layer: int) -> dict[str, Place]:
    """The same for one layer, keys without ``model.layers.{layer}.``"""
    out = {}
    for name, stem in stems(config, layer).items():
        path = ("layers", layer, *stem.field.split("."))
        array = stem.array or stem.shape
        out[name] = Place(path, stem.index, stem.shape, array)
        if stem.bias:
            path = (*path[:-1], f"{path[-1]}_bias")
            place = Place(path, stem.index, stem.shape[:1], array[:-1])
            out[f"{name.removesuffix('weight')}bias"] = place
    return out


def modules(config: Config) -> tuple[str, ...]:
    """What the names of multi-token-prediction tensors in a checkpoint begin with."""
    if config.family in GATED:
        return ("mtp.",)
    if config.family == "mimo":
        return ("model.mtp_layers.",)
    behind = range(config.layers, config.layers + config.mtp_layers)
    return tuple(f"model.layers.{i}." for i in behind)


def arrays(config: Config) -> dict[Path, Shape]:
    """Shape of every array of ``Weights``."""
    return {p.path: p.array for p in places(config).values()}


def assemble(config: Config, parts: dict[Path, Any]) -> Weights:
    """``Weights`` from the arrays of ``arrays(config)``."""
    top = nested(parts)
    layers = top.pop("layers")
    every = tuple(layer_of(config, layers[i]) for i in range(config.layers))
    return Weights(layers=every, **top)


def nested(parts: dict[Path, Any]) -> dict[Any, Any]:
    """``{(a, b): x}`` as ``{a: {b: x}}``."""
    top: dict[Any, Any] = {}
    for path, array in parts.items():
        node = top
        for step in path[:-1]:
            node = node.setdefault(step, {})
        node[path[-1]] = array
    return top


def layer_of(config: Config, fields: dict[str, Any]) -> Any:
    """A layer from its fields, those of its MLP nested."""
    kind: Any = transformer.Layer if config.latent is None else deepseek.Layer
    return kind(**fields | {"mlp": _mlp(fields["mlp"])})


def _mlp(fields: dict[str, Any]) -> Mlp | Moe:
    if "router" not in fields:
        return Mlp(**fields)
    if "shared" in fields:
        fields = fields | {"shared": Mlp(**fields["shared"])}
    return Moe(**fields)


def lookup(params: Weights, path: Path) -> Any:
    """The array at ``path``, or None."""
    node: Any = params
    for step in path:
        node = node[step] if isinstance(step, int) else getattr(node, step, None)
    return node


def stems(config: Config, layer: int) -> dict[str, Stem]:
    """Checkpoint key -> stem, keys without ``model.layers.{layer}.``"""
    attention = _attention(config) if config.latent is None else _latent(config)
    if config.experts is not None and config.has_experts(layer):
        mlp = _experts(config.experts, config.hidden)
    else:
        mlp = _dense("mlp", "mlp", config.intermediate, config.hidden, config.mlp_bias)
    return attention | mlp | _norms(config)


def _attention(config: Config) -> dict[str, Stem]:
    hidden, dim, kv_heads = config.hidden, config.head_dim, config.kv_heads
    group = config.heads // kv_heads * (2 if config.gated else 1)
    fused = (kv_heads, group + 2, dim, hidden)
    every = slice(None)
    q, k, v = (every, slice(group)), (every, group), (every, group + 1)
    q_rows, kv_rows, width = kv_heads * group * dim, kv_heads * dim, config.heads * dim
    bias = config.qkv_bias
    out = {
        "self_attn.q_proj.weight": Stem("qkv", q, (q_rows, hidden), fused, bias),
        "self_attn.k_proj.weight": Stem("qkv", k, (kv_rows, hidden), fused, bias),
        "self_attn.v_proj.weight": Stem("qkv", v, (kv_rows, hidden), fused, bias),
        "self_attn.o_proj.weight": Stem(
            "out", (), (hidden, width), bias=config.out_bias
        ),
    }
    if config.qk_norm:
        out["self_attn.q_norm.weight"] = Stem("q_norm", (), (dim,))
        out["self_attn.k_norm.weight"] = Stem("k_norm", (), (dim,))
    return out


def _latent(config: Config) -> dict[str, Stem]:
    sizes, hidden, heads = latent_sizes(config), config.hidden, config.heads
    low, bias = sizes.query_rank, config.qkv_bias
    q = (heads, config.head_dim, low or hidden)
    kv_b = (heads, sizes.plain_dim + sizes.value_dim, sizes.rank)
    kv_a = (sizes.rank + sizes.rope_dim, hidden)
    out = (hidden, heads * sizes.value_dim)
    table = {
        f"self_attn.{'q_b_proj' if low else 'q_proj'}.weight": Stem(
            "q_b", (), (q[0] * q[1], q[2]), q
        ),
        "self_attn.kv_a_proj_with_mqa.weight": Stem("kv_a", (), kv_a, bias=bias),
        "self_attn.kv_a_layernorm.weight": Stem("kv_a_norm", (), (sizes.rank,)),
        "self_attn.kv_b_proj.weight": Stem(
            "kv_b", (), (kv_b[0] * kv_b[1], kv_b[2]), kv_b
        ),
        "self_attn.o_proj.weight": Stem("out", (), out, bias=config.out_bias),
    }
    if low:
        table["self_attn.q_a_proj.weight"] = Stem("q_a", (), (low, hidden), bias=bias)
        table["self_attn.q_a_layernorm.weight"] = Stem("q_a_norm", (), (low,))
    return table


def _dense(
    name: str, field: str, wide: int, hidden: int, bias: bool = False
) -> dict[str, Stem]:
    both, rows = (2, wide, hidden), (wide, hidden)
    return {
        f"{name}.gate_proj.weight": Stem(f"{field}.gate_up", (0,), rows, both, bias),
        f"{name}.up_proj.weight": Stem(f"{field}.gate_up", (1,), rows, both, bias),
        f"{name}.down_proj.weight": Stem(
            f"{field}.down", (), (hidden, wide), None, bias
        ),
    }


def _experts(experts: Experts, hidden: int) -> dict[str, Stem]:
    count, wide = experts.count, experts.intermediate
    gate_up, down = (count, 2, wide, hidden), (count, hidden, wide)
    table = {"mlp.gate.weight": Stem("mlp.router", (), (count, hidden))}
    if experts.corrected:
        name = "mlp.gate.e_score_correction_bias"
        table[name] = Stem("mlp.correction", (), (count,))
    for e in range(count):
        name, rows = f"mlp.experts.{e}", (wide, hidden)
        table |= {
            f"{name}.gate_proj.weight": Stem("mlp.gate_up", (e, 0), rows, gate_up),
            f"{name}.up_proj.weight": Stem("mlp.gate_up", (e, 1), rows, gate_up),
            f"{name}.down_proj.weight": Stem("mlp.down", (e,), down[1:], down),
        }
    if experts.shared:
        shared = experts.shared * wide
        name = "mlp.shared_expert" if experts.shared_gate else "mlp.shared_experts"
        table |= _dense(name, "mlp.shared", shared, hidden)
    if experts.shared_gate:
        name = "mlp.shared_expert_gate.weight"
        table[name] = Stem("mlp.shared_gate", (), (1, hidden))
    return table


def _norms(config: Config) -> dict[str, Stem]:
    shape = (config.hidden,)
    table = {"input_layernorm.weight": Stem("attn_norm", (), shape)}
    if config.sandwich_norm:
        # Gemma's post_attention_layernorm really stands after attention.
        return table | {
            "post_attention_layernorm.weight": Stem("attn_post_norm", (), shape),
            "pre_feedforward_layernorm.weight": Stem("mlp_norm", (), shape),
            "post_feedforward_layernorm.weight": Stem("mlp_post_norm", (), shape),
        }
    return table | {"post_attention_layernorm.weight": Stem("mlp_norm", (), shape)}
