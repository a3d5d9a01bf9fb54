"""Who drafts. One file per family; each gives a ``Drafter`` of four fields."""

from jspec.drafters import dflash, eagle, growth
from jspec.drafters.draft import Draft
from jspec.drafters.heads import blockwise, medusa
from jspec.drafters.hydra import hydra
from jspec.drafters.loading import load_drafter
from jspec.drafters.multi_token import multi_token
from jspec.drafters.ngram import first, first_whole, latest, ngram
from jspec.drafters.published_medusa import load_medusa, save_medusa
from jspec.drafters.small_model import first_layers, small_model

__all__ = [
    "Draft",
    "blockwise",
    "dflash",
    "eagle",
    "first",
    "first_layers",
    "first_whole",
    "growth",
    "hydra",
    "latest",
    "load_drafter",
    "load_medusa",
    "medusa",
    "multi_token",
    "ngram",
    "save_medusa",
    "small_model",
]
