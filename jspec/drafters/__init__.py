"""Who drafts. One file per family; each gives a ``Drafter`` of four fields."""

from jspec.drafters import dflash, eagle, growth, store
from jspec.drafters.combine import by_score, either, fallback
from jspec.drafters.draft import Draft
from jspec.drafters.heads import blockwise, medusa
from jspec.drafters.hydra import hydra
from jspec.drafters.loading import load_drafter
from jspec.drafters.lookahead import jacobi, lookahead
from jspec.drafters.multi_token import multi_token
from jspec.drafters.ngram import first, first_whole, latest, ngram
from jspec.drafters.ngram_tree import frequency, ngram_tree, recency
from jspec.drafters.published_medusa import load_medusa, save_medusa
from jspec.drafters.recycling import recycling
from jspec.drafters.rest import rest
from jspec.drafters.self_model import self_model
from jspec.drafters.shorten import (
    adaptive,
    confident,
    heuristic,
    moving_average,
    truncate,
)
from jspec.drafters.small_model import first_layers, small_model
from jspec.drafters.suffix import suffix
from jspec.drafters.suffix import tree as suffix_tree

__all__ = [
    "Draft",
    "adaptive",
    "blockwise",
    "by_score",
    "confident",
    "dflash",
    "eagle",
    "either",
    "fallback",
    "first",
    "first_layers",
    "first_whole",
    "frequency",
    "growth",
    "heuristic",
    "hydra",
    "jacobi",
    "latest",
    "load_drafter",
    "load_medusa",
    "lookahead",
    "medusa",
    "moving_average",
    "multi_token",
    "ngram",
    "ngram_tree",
    "recency",
    "recycling",
    "rest",
    "save_medusa",
    "self_model",
    "small_model",
    "store",
    "suffix",
    "suffix_tree",
    "truncate",
]
