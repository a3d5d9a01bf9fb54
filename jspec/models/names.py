"""Where each checkpoint tensor lives in ``Weights``: one table, read in both directions.

Checkpoints keep transformers' names and one tensor per projection; ``Weights`` fuses
the projections that read the same input. A ``Place`` is a view of the fused array.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from jspec.models.config import Config
from jspec.models.transformer import Layer, Weights

Path = tuple[str, int, str] | tuple[str]

PRODUCTS = ("qkv", "out", "gate_up", "down")  # fields of a layer, ``[*lead, in]``


class Place(NamedTuple):
    """One checkpoint tensor inside one array of ``Weights``.

    Attributes:
      path: ``("embed",)``, ``("final_norm",)``, ``("head",)`` or ``("layers", i, field)``.
      index: basic index into that array; ``()`` is all of it.
      shape: the tensor's shape in the checkpoint, a reshape of ``array[index]``.
    """

    path: Path
    index: tuple
    shape: tuple[int, ...]


class Stem(NamedTuple):
    """One kind of tensor: ``index`` and ``shape`` are the weight's, ``bias`` says whether
    there is a bias of shape ``shape[:1]``."""

    field: str
    index: tuple
    shape: tuple[int, ...]
    bias: bool = False


def places(config: Config) -> dict[str, Place]:
    """Checkpoint key -> place, for every tensor a model of this config has."""
    vocab, hidden = config.vocab_size, config.hidden
    table = {
        "model.embed_tokens.weight": Place(("embed",), (), (vocab, hidden)),
        "model.norm.weight": Place(("final_norm",), (), (hidden,)),
    }
    if not config.tie_embeddings:
        table["lm_head.weight"] = Place(("head",), (), (vocab, hidden))
    every = stems(config)
    for i in range(config.layers):
        for name, stem in every.items():
            key = f"model.layers.{i}.{name}"
            path = ("layers", i, stem.field)
            table[f"{key}.weight"] = Place(path, stem.index, stem.shape)
            if stem.bias:
                path = ("layers", i, f"{stem.field}_bias")
                table[f"{key}.bias"] = Place(path, stem.index, stem.shape[:1])
    return table


def arrays(config: Config) -> dict[Path, tuple[int, ...]]:
    """Shape of every array of ``Weights``."""
    hidden, wide, dim = config.hidden, config.intermediate, config.head_dim
    rows = (config.kv_heads, config.heads // config.kv_heads + 2, dim)
    fused = {
        "qkv": (*rows, hidden),
        "qkv_bias": rows,
        "gate_up": (2, wide, hidden),
        "gate_up_bias": (2, wide),
    }
    table = places(config)
    return {p.path: fused.get(str(p.path[-1]), p.shape) for p in table.values()}


def assemble(config: Config, parts: dict[Path, Any]) -> Weights:
    """``Weights`` from the arrays of ``arrays(config)``."""
    layers: list[dict[str, Any]] = [{} for _ in range(config.layers)]
    top = {}
    for path, array in parts.items():
        if len(path) == 1:
            top[path[0]] = array
        else:
            layers[path[1]][path[2]] = array
    return Weights(layers=tuple(Layer(**fields) for fields in layers), **top)


def lookup(params: Weights, path: Path) -> Any:
    """The array at ``path``."""
    if len(path) == 1:
        return getattr(params, path[0])
    return getattr(params.layers[path[1]], path[2])


def stems(config: Config) -> dict[str, Stem]:
    """Tensor name inside a layer -> where it goes, for every tensor of a layer."""
    hidden, wide, dim = config.hidden, config.intermediate, config.head_dim
    group = config.heads // config.kv_heads
    every = slice(None)
    q, k, v = (every, slice(group)), (every, group), (every, group + 1)
    q_rows, kv_rows = config.heads * dim, config.kv_heads * dim
    found = {
        "self_attn.q_proj": Stem("qkv", q, (q_rows, hidden), config.qkv_bias),
        "self_attn.k_proj": Stem("qkv", k, (kv_rows, hidden), config.qkv_bias),
        "self_attn.v_proj": Stem("qkv", v, (kv_rows, hidden), config.qkv_bias),
        "self_attn.o_proj": Stem("out", (), (hidden, q_rows), config.out_bias),
        "mlp.gate_proj": Stem("gate_up", (0,), (wide, hidden), config.mlp_bias),
        "mlp.up_proj": Stem("gate_up", (1,), (wide, hidden), config.mlp_bias),
        "mlp.down_proj": Stem("down", (), (hidden, wide), config.mlp_bias),
        "input_layernorm": Stem("attn_norm", (), (hidden,)),
    }
    if config.qk_norm:
        found["self_attn.q_norm"] = Stem("q_norm", (), (dim,))
        found["self_attn.k_norm"] = Stem("k_norm", (), (dim,))
    if config.sandwich_norm:
        # Gemma's post_attention_layernorm really stands after attention.
        found["post_attention_layernorm"] = Stem("attn_post_norm", (), (hidden,))
        found["pre_feedforward_layernorm"] = Stem("mlp_norm", (), (hidden,))
        found["post_feedforward_layernorm"] = Stem("mlp_post_norm", (), (hidden,))
    else:
        found["post_attention_layernorm"] = Stem("mlp_norm", (), (hidden,))
    return found
