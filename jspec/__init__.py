"""Speculative decoding in JAX: who drafts, how it is verified, how it is scheduled.

The public names, listed by hand. Everything else is reached through its module:
``jspec.verify`` (accept rules), ``jspec.sampling`` (laws), ``jspec.theory`` (closed
forms), ``jspec.testing`` (exact-law assertions, scripted drafters, tiny models).
"""

from jspec import drafters, roofline, sampling, testing, theory, verify
from jspec.decode import decode_round, no_drafts, prefill, run
from jspec.drafters import Draft, load_drafter
from jspec.generation import (
    Delta,
    Output,
    Stream,
    autoregress,
    generate,
    stream,
)
from jspec.models import Config, Model, load, save
from jspec.requests import prepare
from jspec.state import Info, Params, State, truncate
from jspec.stats import Stats
from jspec.types import (
    Block,
    Context,
    Drafter,
    DraftShape,
    Feedback,
    Law,
    Noise,
    Rule,
    Scores,
    Target,
    TargetLaw,
    Verdict,
    chain,
)

__version__ = "0.1.0"

__all__ = [
    "Block",
    "Config",
    "Context",
    "Delta",
    "Draft",
    "DraftShape",
    "Drafter",
    "Feedback",
    "Info",
    "Law",
    "Model",
    "Noise",
    "Output",
    "Params",
    "Rule",
    "Scores",
    "State",
    "Stats",
    "Stream",
    "Target",
    "TargetLaw",
    "Verdict",
    "autoregress",
    "chain",
    "decode_round",
    "drafters",
    "generate",
    "load",
    "load_drafter",
    "no_drafts",
    "prefill",
    "prepare",
    "roofline",
    "run",
    "sampling",
    "save",
    "stream",
    "testing",
    "theory",
    "truncate",
    "verify",
]
