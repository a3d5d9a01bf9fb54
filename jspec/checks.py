"""Numbers from callers, or a ``ValueError`` that names them and their range."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np


def real(name: str, value: Any, low: float = 0.0, high: float = math.inf) -> float:
    """``value`` as a float in ``[low, high]``, finite; ValueError naming it otherwise."""
    number = float(value)
    if not (low <= number <= high and math.isfinite(number)):
        raise ValueError(f"{name} must be finite and in [{low}, {high}], got {number}")
    return number


def positive(name: str, value: Any) -> float:
    """``value`` as a finite float above 0; ValueError naming it otherwise."""
    number = float(value)
    if not (number > 0 and math.isfinite(number)):
        raise ValueError(f"{name} must be finite and > 0, got {number}")
    return number


def count(name: str, value: Any, low: int = 0) -> int:
    """``value`` as an int of at least ``low``; ValueError naming it otherwise."""
    try:
        number = operator.index(value)
    except TypeError:
        number = low - 1
    if number < low:
        raise ValueError(f"{name} must be an integer >= {low}, got {value!r}")
    return number


def array(name: str, value: Any, ndim: int, high: float = math.inf) -> np.ndarray:
    """``value`` as float64 with ``ndim`` axes and entries in ``[0, high]``."""
    array = np.asarray(value, dtype=np.float64)
    if array.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} axes, got shape {array.shape}")
    bad = array[~((array >= 0) & (array <= high) & np.isfinite(array))]
    if bad.size:
        raise ValueError(f"{name} must be finite and in [0, {high}], got {bad[0]}")
    return array
