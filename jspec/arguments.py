"""Options that commands, experiments and benchmarks share."""

from __future__ import annotations

import argparse


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
        choices=("float32", "bfloat16", "float16"),
        help="of the weights (float32 on a CPU, bfloat16 elsewhere); on a CPU with AMX "
        "bfloat16 scores several tokens in hardly more time than one",
    )
