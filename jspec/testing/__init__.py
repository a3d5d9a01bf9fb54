"""Public test tools: exact laws of rules, drafters that know, tiny random models."""

from jspec.testing import scripted, tiny
from jspec.testing.enumeration import (
    Scheme,
    branching,
    one_hot_law,
    random_law,
    random_target,
    ranking,
)
from jspec.testing.law import (
    CHAINS,
    TREES,
    Emission,
    assert_lossless,
    battery,
    emitted_law,
    emitted_laws,
    raced_law,
    raced_laws,
)

__all__ = [
    "CHAINS",
    "TREES",
    "Emission",
    "Scheme",
    "assert_lossless",
    "battery",
    "branching",
    "emitted_law",
    "emitted_laws",
    "one_hot_law",
    "raced_law",
    "raced_laws",
    "random_law",
    "random_target",
    "ranking",
    "scripted",
    "tiny",
]
