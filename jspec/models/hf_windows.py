"""Sliding windows of a transformers config: one entry per layer."""

from __future__ import annotations

from collections.abc import Callable

from jspec.models.hf_families import GATED
from jspec.models.hf_families import layer_kinds as gated_kinds
from jspec.models.hf_rope import unsupported


def kind(window: int | None) -> str:
    """transformers' name for a layer with this window, in tokens, or without one."""
    return "full_attention" if window is None else "sliding_attention"


def layer_kinds(hf: dict, family: str, layers: int) -> list[str]:
    """Per layer ``full_attention`` or ``sliding_attention``.

    Raises:
      ValueError: ``layer_types`` says what the family cannot do.
    """
    slides: Callable[[int], bool] = {
        "llama": lambda i: False,
        "mistral": lambda i: hf.get("sliding_window") is not None,
        "qwen2": lambda i: _qwen_slides(hf, i),
        "qwen3": lambda i: _qwen_slides(hf, i),
        "gemma3_text": lambda i: (i + 1) % hf.get("sliding_window_pattern", 6) != 0,
        "qwen3_moe": lambda i: _qwen_window(hf) is not None,
        "deepseek_v2": lambda i: False,
        "deepseek_v3": lambda i: False,
        "glm4_moe": lambda i: False,
        "mimo": lambda i: False,
    }.get(family, lambda i: False)
    implied = [
        "sliding_attention" if slides(i) else "full_attention" for i in range(layers)
    ]
    kinds = hf.get("layer_types")
    if kinds is None and family in GATED:
        kinds = gated_kinds(hf, layers)
    if kinds is None:
        return implied
    if len(kinds) != layers:
        raise ValueError(f"layer_types has {len(kinds)} entries for {layers} layers")
    for name in kinds:
        if name not in ("full_attention", "sliding_attention"):
            raise unsupported("layer_types", name, "full_attention, sliding_attention")
    if family not in ("qwen2", "qwen3", "gemma3_text") and kinds != implied:
        raise unsupported("layer_types", kinds, f"{family} has equal layers")
    return list(kinds)


def _qwen_slides(hf: dict, layer: int) -> bool:
    return _qwen_window(hf) is not None and layer >= hf.get("max_window_layers", 28)


def _qwen_window(hf: dict) -> int | None:
    return hf.get("sliding_window") if hf.get("use_sliding_window") else None


def windows(hf: dict, kinds: list[str]) -> tuple[int | None, ...]:
    """Per layer of ``kinds`` its window in tokens, or None.

    Raises:
      ValueError: a layer slides, but the config gives no window.
    """
    qwen = hf["model_type"] in ("qwen2", "qwen3", "qwen3_moe")
    window = _qwen_window(hf) if qwen else hf.get("sliding_window")
    if window is None and "sliding_attention" in kinds:
        raise ValueError(
            "layer_types has sliding_attention layers but the config gives no window "
            "(sliding_window, and use_sliding_window for Qwen)"
        )
    return tuple(window if k == "sliding_attention" else None for k in kinds)
