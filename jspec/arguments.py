"""Options that commands, experiments and benchmarks share."""

from __future__ import annotations

import argparse
from pathlib import Path

from jspec.pallas import platform

_CPU = Path("/proc/cpuinfo")


def add_target(parser: argparse.ArgumentParser) -> None:
    """``--target`` and ``--dtype``, for ``load(args.target, dtype=args.dtype)``."""
    parser.add_argument(
        "--target",
        default="smollm2-135m",
        metavar="MODEL",
        help="alias, Hub id, folder, .safetensors or .gguf file (smollm2-135m)",
    )
    parser.add_argument(
        "--dtype",
        type=_dtype,
        choices=("float32", "bfloat16", "float16"),
        metavar="{float32,bfloat16,float16,auto}",
        help="of the weights (float32 on a CPU, bfloat16 elsewhere; experiments with heads: "
        "auto); on a CPU with AMX bfloat16 scores several tokens in hardly more time than "
        "one, and auto is bfloat16 there too",
    )


def _dtype(name: str) -> str:
    """A value of ``--dtype``; "auto" is what scores blocks fastest here."""
    if name != "auto":
        return name
    has_matrix_units = platform() != "cpu" or (
        _CPU.exists() and "amx_bf16" in _CPU.read_text().split()
    )
    return "bfloat16" if has_matrix_units else "float32"
