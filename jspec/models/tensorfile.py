"""Safetensors files read straight into given memory and written tensor by tensor.

The safetensors package maps a file (mapped pages count as memory next to the weights)
and writes from a dictionary of all tensors at once. Loading and converting here never
hold more than the weights and one tensor, so this file reads and writes the format
itself: eight bytes of header length, a JSON header, the raw tensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_ID_MAPS = {
    "I64": np.dtype(np.int64),
    "BOOL": np.dtype(np.bool_),
}  # written as they are
NAMES = {dtype: name for name, dtype in (DTYPES | _ID_MAPS).items()}
_LONGEST_HEADER = 100_000_000  # the format's own limit


class Stored(NamedTuple):
    """Where a tensor lies: file, first byte, shape and dtype name."""

    file: Path
    start: int
    shape: tuple[int, ...]
    dtype: str


def index(file: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file.

    Raises:
      ValueError: the file is truncated or not a safetensors file.
    """
    size = file.stat().st_size
    with file.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or not 0 < length <= min(size - 8, _LONGEST_HEADER):
            raise ValueError(
                f"{file} is truncated or not a safetensors file ({size} bytes); "
                "fetch or save it again"
            )
        try:
            header = json.loads(f.read(length))
        except ValueError as error:
            raise ValueError(
                f"{file} has no readable safetensors header; fetch or save it again"
            ) from error
    header.pop("__metadata__", None)
    ends = [tensor["data_offsets"][1] for tensor in header.values()]
    needed = 8 + length + max(ends, default=0)
    if size < needed:
        raise ValueError(
            f"{file} is truncated: {size} bytes where its header asks for {needed}; "
            "fetch or save it again"
        )
    return {
        name: Stored(
            file, 8 + length + t["data_offsets"][0], tuple(t["shape"]), t["dtype"]
        )
        for name, t in header.items()
    }


def read(name: str, stored: Stored, out: np.ndarray) -> None:
    """Reads a tensor into ``out``, which has its size but may have any float dtype.

    Raises:
      ValueError: a dtype that is not a float type of ``DTYPES``.
    """
    if stored.dtype not in DTYPES:
        raise ValueError(
            f"{stored.file}: tensor {name} has dtype {stored.dtype}; supported are "
            f"{', '.join(DTYPES)}"
        )
    dtype = DTYPES[stored.dtype]
    direct = out.dtype == dtype and out.flags.c_contiguous
    raw = out if direct else np.empty(stored.shape, dtype)
    with stored.file.open("rb", buffering=0) as f:
        f.seek(stored.start)
        view = raw.reshape(-1).view(np.uint8).data
        while view:
            count = f.readinto(view)
            if not count:
                raise ValueError(f"{stored.file} ended inside tensor {name}")
            view = view[count:]
    if not direct:
        out[...] = raw.reshape(out.shape)


def write(
    file: Path,
    specs: dict[str, tuple[tuple[int, ...], np.dtype]],
    tensor: Callable[[str], np.ndarray],
) -> None:
    """Writes the tensors of ``specs`` (name -> shape, dtype), asking for one at a time."""
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (shape, dtype) in specs.items():
        end = offset + int(np.prod(shape)) * dtype.itemsize
        header[name] = {
            "dtype": NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for name, (shape, dtype) in specs.items():
            array = np.ascontiguousarray(tensor(name), dtype).reshape(shape)
            f.write(array.reshape(-1).view(np.uint8).data)
        f.flush()
        os.fsync(f.fileno())
