"""Rotary settings of a transformers config <-> ``Rope``.

Both layouts: ``rope_parameters`` (transformers 5; per layer type for Gemma 3), and
``rope_theta`` with ``rope_scaling`` (transformers 4). Defaults are those of
transformers' ``modeling_rope_utils``.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jspec.models.config import Rope
from jspec.models.hf_families import GATED, ROTATED

_KINDS = {"full_attention", "sliding_attention"}
ROPES = ("default", "linear", "dynamic", "llama3", "yarn")


def unsupported(key: str, value: Any, supported: Any) -> ValueError:
    """The error for a config key; ``supported`` is a text or a list of values."""
    if not isinstance(supported, str):
        supported = ", ".join(map(str, supported))
    return ValueError(
        f"config key {key} = {value!r} is not supported (supported: {supported})"
    )


def ropes_from_hf(hf: dict, kinds: list[str]) -> tuple[Rope, ...]:
    """Per layer of ``kinds`` (``full_attention``, ``sliding_attention``) its ``Rope``.

    Raises:
      ValueError: a rope type or a setting that is missing or not supported.
    """
    if hf["model_type"] == "gemma3_text":
        both = _gemma_rope_settings(hf)
        by_kind = {k: _rope(hf, both[k]) for k in set(kinds)}
        return tuple(by_kind[k] for k in kinds)
    settings = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    if _KINDS & settings.keys():
        raise unsupported("rope_parameters", settings, "one for all layers")
    settings.setdefault("rope_theta", hf.get("rope_theta", 10000.0))
    return (_rope(hf, settings),) * len(kinds)


def rope_to_hf(rope: Rope) -> dict:
    """The entry of ``rope_parameters`` that means ``rope``."""
    out: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        out["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn"):
        out["original_max_position_embeddings"] = rope.original
    if rope.kind == "llama3":
        out |= {"low_freq_factor": rope.low_freq, "high_freq_factor": rope.high_freq}
    if rope.kind == "yarn":
        out |= {
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "attention_factor": rope.attention_factor,
            "truncate": rope.truncate,
        }
    return out


def _gemma_rope_settings(hf: dict) -> dict[str, dict]:
    """Full layers have a large base and take the scaling; sliding layers neither."""
    new = hf.get("rope_parameters") or {}
    if new and not _KINDS & new.keys():
        raise unsupported("rope_parameters", new, "full_attention, sliding_attention")
    full = dict(new.get("full_attention") or {}) | dict(hf.get("rope_scaling") or {})
    sliding = dict(new.get("sliding_attention") or {})
    full.setdefault("rope_theta", hf.get("rope_theta", 1_000_000.0))
    sliding.setdefault("rope_theta", hf.get("rope_local_base_freq", 10_000.0))
    return {"full_attention": full, "sliding_attention": sliding}


def _rope(hf: dict, settings: dict) -> Rope:
    kind = settings.get("rope_type", settings.get("type")) or "default"
    if kind not in ROPES:
        raise unsupported("rope_type", kind, ROPES)
    # The three positions of a token of text are the same, so sections do not matter.
    if settings.get("mrope_section") and hf["model_type"] not in GATED:
        raise unsupported("mrope_section", settings["mrope_section"], "text only")
    return dataclasses.replace(
        _variant(hf, settings, kind), fraction=_rotated(hf, settings)
    )


def _rotated(hf: dict, settings: dict) -> float:
    """The share of a head that is rotated."""
    said = settings.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    if hf["model_type"] in ROTATED:
        return float(ROTATED[hf["model_type"]] if said is None else said)
    if said not in (None, 1, 1.0):
        raise unsupported("partial_rotary_factor", said, "1.0")
    return 1.0


def _variant(hf: dict, settings: dict, kind: str) -> Rope:
    theta = float(settings["rope_theta"])
    if kind == "default":
        return Rope(theta=theta)
    longest = int(hf["max_position_embeddings"])
    original = int(
        hf.get("original_max_position_embeddings")
        or settings.get("original_max_position_embeddings")
        or longest
    )
    if kind == "linear":
        return Rope(theta, "linear", _factor(settings, kind))
    if kind == "dynamic":
        return Rope(theta, "dynamic", _factor(settings, kind), longest)
    if kind == "llama3":
        return Rope(
            theta,
            "llama3",
            _factor(settings, kind),
            original,
            low_freq=_factor(settings, kind, "low_freq_factor"),
            high_freq=_factor(settings, kind, "high_freq_factor"),
        )
    if settings.get("factor") is None:
        settings = settings | {"factor": longest / original}
    return Rope(
        theta,
        "yarn",
        _factor(settings, kind),
        original,
        beta_fast=float(settings.get("beta_fast") or 32),
        beta_slow=float(settings.get("beta_slow") or 1),
        attention_factor=_yarn_attention(settings),
        truncate=bool(settings.get("truncate", True)),
    )


def _factor(settings: dict, kind: str, key: str = "factor") -> float:
    if settings.get(key) is None:
        raise ValueError(f"rope type {kind} needs the key {key}")
    return float(settings[key])


def _yarn_attention(settings: dict) -> float:
    """Factor on cos and sin; YaRN (arXiv 2309.00071) eq. 22, DeepSeek's mscale pair."""
    if settings.get("attention_factor") is not None:
        return float(settings["attention_factor"])
    factor = settings["factor"]

    def mscale(m: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0

    m, m_all = settings.get("mscale"), settings.get("mscale_all_dim")
    return mscale(m) / mscale(m_all) if m and m_all else mscale(1.0)
