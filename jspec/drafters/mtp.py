"""Multi-token prediction: modules that were trained with their target.

A module (DeepSeek-V3, arXiv 2412.19437, section 2.2) joins the target's last hidden state
``h_t`` to the token that follows it and runs one layer of the target's kind:

    h'_t = layer(fc [norm(embed(x_{t+1})); norm(h_t)])

The target's own head reads ``h'`` after a norm of the module, and the normed ``h'`` takes
the place of ``h_{t+1}`` when the next token has been drafted. One module drafts a chain by
being fed its own output; a target with several has one for every depth
(``mtp_modules``). GLM-4.5, Qwen3-Next and MiMo differ in their layer, and MiMo in the
order of the two halves.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jspec.drafters import eagle
from jspec.drafters.eagle import Design, Weights
from jspec.drafters.growth import Grower
from jspec.drafters.layers import Attention
from jspec.drafters.mtp_modules import sequential
from jspec.drafters.recurrent import recurrent
from jspec.models.config import Config
from jspec.models.linear import linear
from jspec.models.transformer import rms_norm
from jspec.types import Array, Drafter


def embedding_first(
    design: Design, params: Weights, e: Array, g: Array, attention: Attention
):
    """Residual and attention of a module whose ``fc`` reads ``[embedding; hidden]``."""
    return _enter(design, params, _normed(design, params, e, g), attention)


def hidden_first(
    design: Design, params: Weights, e: Array, g: Array, attention: Attention
):
    """The same for ``[hidden; embedding]``, the order of MiMo."""
    return _enter(design, params, _normed(design, params, e, g)[::-1], attention)


def _normed(design: Design, params: Any, e: Array, g: Array) -> list[Array]:
    config = design.config
    return [
        rms_norm(e, params.embed_norm, config),
        rms_norm(g, params.hidden_norm, config),
    ]


def _enter(design: Design, params: Any, halves: list[Array], attention: Attention):
    z = linear(jnp.concatenate(halves, -1), params.fc, params.fc_bias)
    return z, attention(0, rms_norm(z, params.layers[0].attn_norm, design.config))


def design_of(config: Config, first=embedding_first) -> Design:
    """What a module is apart from its weights.

    Args:
      config: of its one layer.
      first: ``embedding_first`` or ``hidden_first``.

    Raises:
      ValueError: a config of several layers.
    """
    if config.layers != 1:
        raise ValueError(
            f"a config of {config.layers} layers; a module has one (Config.first(1))"
        )
    return Design(config, (-1,), first, eagle.as_is, norm_output=True)


def drafter(
    design: Design, grower: Grower, modules: int = 1, dtype=jnp.float32
) -> Drafter:
    """Drafts with the prediction modules of a target.

    Its params are the module's ``Weights``, or a tuple of them if there are several.

    Args:
      design: of every module, see ``design_of``.
      grower: ``growth.chain`` as a rule; modules are trained on chains.
      modules: how many there are. The draft of depth ``d`` comes from module ``(d - 1)
        mod modules``: a single one is used again at every depth.
      dtype: of the caches.

    Raises:
      ValueError: ``modules < 1``.
    """
    if modules < 1:
        raise ValueError(f"{modules} modules; a drafter needs at least 1")
    if modules == 1:
        return recurrent(eagle.net(design), grower, dtype=dtype)
    return sequential(design, modules, grower, dtype=dtype)
