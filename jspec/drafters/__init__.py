"""Who drafts. One file per family; each gives a ``Drafter`` of four fields."""

from jspec.drafters import eagle, growth
from jspec.drafters.loading import Draft, load_drafter
from jspec.drafters.ngram import first, first_whole, latest, ngram
from jspec.drafters.small_model import first_layers, small_model

__all__ = [
    "Draft",
    "eagle",
    "first",
    "first_layers",
    "first_whole",
    "growth",
    "latest",
    "load_drafter",
    "ngram",
    "small_model",
]
