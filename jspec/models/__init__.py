"""Target models: what they are, where they come from, how they score."""

from jspec.models.architecture import target
from jspec.models.config import Config
from jspec.models.load import Model, load
from jspec.models.save import save
from jspec.models.transformer import Weights

__all__ = ["Config", "Model", "Weights", "load", "save", "target"]
