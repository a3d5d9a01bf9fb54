"""What is trained for each method: where it begins, what it minimises, what it leaves.

A recipe joins a head to its target's frozen arrays, so that ``fit`` sees parameters and a
pure loss. Heads begin at the target's own last layer, norm and head where they can.
"""

from __future__ import annotations

from collections.abc import Callable

from jspec.train.recipes.dflash import dflash, dflash2, dspark
from jspec.train.recipes.eagle import eagle1, eagle3
from jspec.train.recipes.heads import blockwise, medusa
from jspec.train.recipes.mtp import mtp
from jspec.train.recipes.recipe import Recipe, vocabulary
from jspec.train.recipes.small import small

RECIPES: dict[str, Callable[..., Recipe]] = {
    "blockwise": blockwise,
    "dflash": dflash,
    "dflash2": dflash2,
    "dspark": dspark,
    "eagle1": eagle1,
    "eagle3": eagle3,
    "medusa": medusa,
    "mtp": mtp,
    "small": small,
}

__all__ = ["RECIPES", "Recipe", "vocabulary"]
