"""What a decoder-only transformer is, as one frozen, hashable value.

A ``Config`` is static under ``jit``: equal configs share compiled programs.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary embedding of one kind of layer.

    Attributes:
      theta: base.  kind: default, linear, dynamic, llama3, yarn or proportional.
      factor: scaling factor of every kind but default.
      original: context length before scaling (dynamic, llama3, yarn).
      low_freq, high_freq: llama3 only.
      beta_fast, beta_slow, attention_factor, truncate: yarn only.
      fraction: share of a head that is rotated, from its beginning; if proportional, of
        its pairs.
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
    fraction: float = 1.0


@dataclasses.dataclass(frozen=True)
class Experts:
    """Mixture-of-experts MLPs: a router sends every token to a few of many MLPs.

    Attributes:
      count: routed experts of a layer, E.
      per_token: experts a token is sent to.
      intermediate: width of one expert.
      score: ``softmax`` or ``sigmoid`` of the router's logits.
      normalise: the chosen experts' scores are divided by their sum.
      scale: factor on them after that.
      groups, groups_kept: experts stand in equal groups, and only those of the best
        ``groups_kept`` groups can be chosen.
      corrected: the choice, not the weights, adds a learnt correction to the scores, and
        a group is as good as its two best experts together (DeepSeek-V3). If not, a
        group is as good as its best expert (DeepSeek-V2).
      shared: experts that every token is sent to, stored as one MLP.
      shared_gate: their output is multiplied by the sigmoid of a product of its own.
      dense_layers: ids of the layers that have an ordinary MLP instead.
    """

    count: int
    per_token: int
    intermediate: int
    score: str = "softmax"
    normalise: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_kept: int = 1
    corrected: bool = False
    shared: int = 0
    shared_gate: bool = False
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self):
        if self.groups < 1 or self.count % self.groups:
            raise ValueError(
                f"{self.count} experts do not stand in {self.groups} equal groups"
            )
        if not 1 <= self.groups_kept <= self.groups:
            raise ValueError(f"{self.groups_kept} of {self.groups} groups of experts")
        size = self.count // self.groups
        if self.corrected and size < 2:
            raise ValueError(
                f"{self.groups} groups of {size} expert; a group needs two to be ranked"
            )
        if not 1 <= self.per_token <= self.groups_kept * size:
            raise ValueError(
                f"{self.per_token} experts a token, but {self.groups_kept} groups hold "
                f"{self.groups_kept * size}"
            )


@dataclasses.dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: one small vector a token instead of keys and values.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.

    Attributes:
      rank: size of the vector that all heads' keys and values are made from.
      query_rank: size of the vector that queries are made from; None when they are made
        from the hidden state.
      plain_dim, rope_dim: the parts of a query or key head without rotation and with it;
        the rotated part of the key is shared by all heads.
      value_dim: size of a value head.
      interleave: rotary pairs are ``(x_2i, x_2i+1)``, not ``(x_i, x_i+D/2)``.
      mscale_all_dim: YaRN's factor on the scores is ``0.1 mscale_all_dim ln(factor) + 1``,
        squared; 0 for none. ``Config.query_scale`` contains it.
    """

    rank: int
    query_rank: int | None
    plain_dim: int
    rope_dim: int
    value_dim: int
    interleave: bool = True
    mscale_all_dim: float = 0.0


@dataclasses.dataclass(frozen=True)
class Config:
    """A Llama, SmolLM2, Mistral, Qwen, GLM, MiMo, Gemma 3 or DeepSeek text model.

    Attributes:
      family: transformers' ``model_type``.
      vocab_size: real vocabulary; head rows beyond it are padding and never win.
      hidden, layers, heads, kv_heads, head_dim, intermediate: sizes.
      norm_eps: RMSNorm epsilon.  zero_centred: weights are stored as ``w - 1``.
      activation: ``silu``, ``gelu_pytorch_tanh`` or ``gelu``.
      tie_embeddings: the head is the embedding.
      qkv_bias, out_bias, mlp_bias: which products carry a bias.
      qk_norm: RMSNorm on every query and key head.
      gated: a query head comes with a gate, whose sigmoid multiplies the head's output.
      sandwich_norm: norms after attention and MLP too (Gemma).
      embed_scale: factor on the embedding (Gemma: sqrt(hidden)).
      query_scale: factor on ``q . k``.
      windows: per layer, sliding window in tokens or None.
      ropes: per layer.
      attn_softcap, final_softcap: ``c * tanh(x / c)`` on scores and logits, or None.
      experts: which layers have experts and how they are chosen, or None.
      latent: sizes of latent attention, or None; then ``head_dim`` is that of a query.
      mtp_layers: layers for multi-token prediction that a checkpoint stores behind the
        others. They are no part of the target.
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
    gated: bool = False
    sandwich_norm: bool = False
    embed_scale: float = 1.0
    query_scale: float = 1.0
    windows: tuple[int | None, ...] = ()
    ropes: tuple[Rope, ...] = ()
    attn_softcap: float | None = None
    final_softcap: float | None = None
    experts: Experts | None = None
    latent: Latent | None = None
    mtp_layers: int = 0
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

    def has_experts(self, layer: int) -> bool:
        """Whether layer ``layer`` (0-based) has experts instead of an ordinary MLP."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def first(self, count: int) -> Config:
        """The config of the first ``count`` layers under the same norm and head."""
        experts = self.experts
        if experts is not None:
            dense = tuple(i for i in experts.dense_layers if i < count)
            experts = dataclasses.replace(experts, dense_layers=dense)
        return dataclasses.replace(
            self,
            layers=count,
            windows=self.windows[:count],
            ropes=self.ropes[:count],
            experts=experts,
        )
