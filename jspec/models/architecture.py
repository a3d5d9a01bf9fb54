"""Which forward a config asks for: the transformer's, or DeepSeek's latent attention."""

from __future__ import annotations

import jax.numpy as jnp

from jspec.models import deepseek, transformer
from jspec.models.config import Config
from jspec.models.transformer import Weights
from jspec.types import Array, Target


def target(config: Config) -> Target:
    """The pure functions of a model; equal configs give the same object."""
    return _module(config).target(config)


def init(config: Config, key: Array, dtype=jnp.float32, scale: float = 0.02) -> Weights:
    """Random weights (normal, ``scale``; norms at their neutral value)."""
    return _module(config).init(config, key, dtype, scale)


def _module(config: Config):
    return transformer if config.latent is None else deepseek
