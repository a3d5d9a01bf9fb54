"""Configs of well-known models by name: sizes for predictions, no weights needed.

Taken from the models' published ``config.json`` files.
"""

from __future__ import annotations

import math

from jspec.models.config import Config, Experts, Latent, Rope

_LLAMA3_ROPE = Rope(
    theta=500000.0, kind="llama3", factor=8.0, original=8192, low_freq=1, high_freq=4
)


def _dense(family: str, layers: int, rope: Rope, **sizes) -> Config:
    return Config(
        family=family,
        layers=layers,
        kv_heads=8,
        head_dim=128,
        query_scale=128**-0.5,
        windows=(None,) * layers,
        ropes=(rope,) * layers,
        **sizes,
    )


def _llama(layers: int, hidden: int, heads: int, intermediate: int) -> Config:
    return _dense(
        "llama",
        layers,
        _LLAMA3_ROPE,
        vocab_size=128256,
        hidden=hidden,
        heads=heads,
        intermediate=intermediate,
        max_position=131072,
        eos_ids=(128001, 128008, 128009),
        bos_id=128000,
    )


def _qwen3(layers: int, hidden: int, heads: int, intermediate: int) -> Config:
    return _dense(
        "qwen3",
        layers,
        Rope(theta=1000000.0),
        vocab_size=151936,
        hidden=hidden,
        heads=heads,
        intermediate=intermediate,
        norm_eps=1e-6,
        qk_norm=True,
        max_position=40960,
        eos_ids=(151645, 151643),
    )


def _deepseek_v3() -> Config:
    layers, dim, factor = 61, 192, 40.0
    stretch = 0.1 * math.log(factor) + 1
    rope = Rope(theta=10000.0, kind="yarn", factor=factor, original=4096)
    return Config(
        family="deepseek_v3",
        vocab_size=129280,
        hidden=7168,
        layers=layers,
        heads=128,
        kv_heads=128,
        head_dim=dim,
        intermediate=18432,
        norm_eps=1e-6,
        query_scale=dim**-0.5 * stretch**2,
        windows=(None,) * layers,
        ropes=(rope,) * layers,
        experts=Experts(
            count=256,
            per_token=8,
            intermediate=2048,
            score="sigmoid",
            scale=2.5,
            groups=8,
            groups_kept=4,
            corrected=True,
            shared=1,
            dense_layers=(0, 1, 2),
        ),
        latent=Latent(
            rank=512,
            query_rank=1536,
            plain_dim=128,
            rope_dim=64,
            value_dim=128,
            mscale_all_dim=1.0,
        ),
        mtp_layers=1,
        max_position=163840,
        eos_ids=(1,),
        bos_id=0,
    )


PRESETS = {
    "llama-3.1-8b": _llama(32, 4096, 32, 14336),
    "llama-3.1-70b": _llama(80, 8192, 64, 28672),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288),
    "qwen3-32b": _qwen3(64, 5120, 64, 25600),
    "deepseek-v3": _deepseek_v3(),
}


def preset(name: str) -> Config:
    """The config of a model by name.

    Raises:
      ValueError: an unknown name.
    """
    if name not in PRESETS:
        raise ValueError(f"target {name!r} is not one of {', '.join(sorted(PRESETS))}")
    return PRESETS[name]
