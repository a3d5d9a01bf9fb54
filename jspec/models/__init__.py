"""Target models: configs, weights, loading and the transformer."""

from jspec.models.config import Config
from jspec.models.load import Model, load
from jspec.models.transformer import Weights, target

__all__ = ["Config", "Model", "Weights", "load", "target"]
