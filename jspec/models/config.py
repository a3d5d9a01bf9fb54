"""What a decoder-only transformer is, as one frozen, hashable value.

A ``Config`` is static under ``jit``: equal configs share compiled programs.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary embedding of one kind of layer.

    Attributes:
      theta: base.  kind: default, linear, dynamic, llama3 or yarn.
      factor: scaling factor of every kind but default.
      original: context length before scaling (dynamic, llama3, yarn).
      low_freq, high_freq: llama3 only.
      beta_fast, beta_slow, attention_factor, truncate: yarn only.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original: int = 0
    low_freq: float = 1.0
    high_freq: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclasses.dataclass(frozen=True)
class Config:
    """A Llama, SmolLM2, Mistral, Qwen2, Qwen3 or Gemma 3 text model.

    Attributes:
      family: transformers' ``model_type``.
      vocab_size: real vocabulary; head rows beyond it are padding and never win.
      hidden, layers, heads, kv_heads, head_dim, intermediate: sizes.
      norm_eps: RMSNorm epsilon.  zero_centred: weights are stored as ``w - 1``.
      activation: ``silu``, ``gelu_pytorch_tanh`` or ``gelu``.
      tie_embeddings: the head is the embedding.
      qkv_bias, out_bias, mlp_bias: which products carry a bias.
      qk_norm: RMSNorm on every query and key head.
      sandwich_norm: norms after attention and MLP too (Gemma).
      embed_scale: factor on the embedding (Gemma: sqrt(hidden)).
      query_scale: factor on ``q . k``.
      windows: per layer, sliding window in tokens or None.
      ropes: per layer.
      attn_softcap, final_softcap: ``c * tanh(x / c)`` on scores and logits, or None.
      max_position: longest context the model was made for, in tokens.
      eos_ids, bos_id: special ids (bos None when the model has none).
    """

    family: str
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    norm_eps: float = 1e-5
    zero_centred: bool = False
    activation: str = "silu"
    tie_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sandwich_norm: bool = False
    embed_scale: float = 1.0
    query_scale: float = 1.0
    windows: tuple[int | None, ...] = ()
    ropes: tuple[Rope, ...] = ()
    attn_softcap: float | None = None
    final_softcap: float | None = None
    max_position: int = 2048
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None

    def __post_init__(self):
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} query heads cannot share {self.kv_heads} key/value heads"
            )
        for name in ("windows", "ropes"):
            if len(getattr(self, name)) != self.layers:
                raise ValueError(
                    f"{name} has {len(getattr(self, name))} entries for "
                    f"{self.layers} layers"
                )
