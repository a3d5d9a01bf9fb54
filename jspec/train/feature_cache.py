"""Features of packed rows in a file, for corpora that are trained on many times.

A folder holds ``features.bin``, the rows one after the other, each ``[T, F + M]``, and
``manifest.json``, which says what they are of and how many are there. A row counts from
the moment the manifest counts it, so a writer that is killed or runs out of disk leaves
a shorter file, not a broken one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.train.atomic import replacing
from jspec.train.features import Features, extract
from jspec.train.packing import Rows, order
from jspec.types import Array, Target

_DTYPES = ("float16", "bfloat16", "float32")


class FeatureCache:
    """The rows that are there, mapped into memory.

    Attributes:
      done: how many, from the first of the packed rows on.
    """

    def __init__(self, folder: str | Path):
        """Raises FileNotFoundError or ValueError for a folder without whole rows."""
        self._folder = Path(folder)
        self._manifest = _manifest(self._folder)
        self.done: int = self._manifest["done"]
        if not self.done:
            raise ValueError(f"{folder} holds no rows yet; run cache_features again")
        length, width = self._manifest["length"], self._manifest["width"]
        try:
            self._rows = np.memmap(
                self._folder / "features.bin",
                dtype=jnp.dtype(self._manifest["dtype"]),
                mode="r",
                shape=(self.done, length, width),
            )
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{folder}/features.bin is shorter than the {self.done} rows of its "
                f"manifest ({error}); delete the folder and run cache_features again"
            ) from error

    def read(self, index: np.ndarray, taps: tuple[int, ...] | None = None) -> Features:
        """The features of these rows, float32.

        Args:
          index: numbers of rows.
          taps: which of the taps that are there; None is all of them.

        Raises:
          ValueError: one of ``taps`` is not there.
        """
        stored, tapped = self._manifest["taps"], self._manifest["tapped"]
        wanted = stored if taps is None else taps
        if not set(wanted) <= set(stored):
            raise ValueError(
                f"{self._folder} holds features of layers {stored}, wanted "
                f"{list(wanted)}; use another folder or delete this one"
            )
        found = self._rows[index]
        size = tapped // len(stored) if stored else 0
        at = [stored.index(tap) * size for tap in wanted]
        parts = [found[..., start : start + size] for start in at]

        def device(x: np.ndarray) -> Array:
            return jnp.asarray(x).astype(jnp.float32)

        return Features(
            device(np.concatenate(parts, -1)) if parts else None,
            device(found[..., tapped:]),
        )

    def batches(
        self,
        rows: Rows,
        size: int,
        seed: int = 0,
        taps: tuple[int, ...] | None = None,
        limit: int | None = None,
    ) -> Callable[[int], Rows]:
        """``packing.batches`` over the rows that are there, with their features.

        Args:
          rows: those the features are of.  size, seed: as in ``packing.batches``.
          taps: as in ``read``.
          limit: use only so many rows, however many have come since; None is all.

        Raises:
          ValueError: ``rows`` are not the ones the features are of; as ``read``.
        """
        _compare(self._folder, self._manifest, {"rows": _hash_rows(rows)})
        count = self.done if limit is None else min(limit, self.done)
        order(count, size, seed, 0)

        def step(number: int) -> Rows:
            index = order(count, size, seed, number)
            found = self.read(index, taps)
            return dataclasses.replace(
                rows.take(index), features=found.taps, hidden=found.hidden
            )

        return step


def cache_features(
    folder: str | Path,
    rows: Rows,
    params: Any,
    *,
    target: Target,
    taps: tuple[int, ...] = (),
    batch: int = 4,
    dtype="bfloat16",
    compute_dtype=jnp.float32,
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> FeatureCache:
    """Writes the features of packed rows; a call that was cut short is continued.

    Args:
      folder: made if it is missing.
      rows: from ``packing.rows``.
      params, target, taps: as for ``extract``.
      batch: rows computed at once.
      dtype: of the file: bfloat16 (any magnitude, 8 bits), float16 (11 bits, up to
        65504) or float32.
      compute_dtype: ``dtype`` of ``extract``.
      limit: write only so many rows; None is all.
      progress: called with (rows done, rows wanted) after every batch.

    Raises:
      ValueError: the folder holds features of something else, or values do not fit
        float16.
      OSError: the disk is full or cannot be written. The rows before stay usable.
    """
    folder, name = Path(folder), jnp.dtype(dtype).name
    if name not in _DTYPES:
        raise ValueError(f"dtype {name} is not one of {', '.join(_DTYPES)}")
    count = len(rows) if limit is None else min(limit, len(rows))
    about = {
        "target": fingerprint(target, params),
        "taps": list(taps),
        "rows": _hash_rows(rows),
        "length": rows.tokens.shape[1],
        "dtype": name,
    }
    done = _begin(folder, about)

    def compute(start: int) -> Features:
        # The last batch is filled up, so that all share one program.
        index = np.minimum(np.arange(start, start + batch), count - 1)
        part = rows.take(index)
        return extract(
            params,
            part.tokens,
            part.document,
            part.position,
            target=target,
            taps=taps,
            dtype=compute_dtype,
        )

    try:
        with open(folder / "features.bin", "ab") as file:
            while done < count:
                found = compute(done)
                keep = min(batch, count - done)
                values = _encoded(found, keep, name)
                file.write(values.tobytes())
                file.flush()
                os.fsync(file.fileno())
                done += keep
                tapped = 0 if found.taps is None else found.taps.shape[-1]
                sizes = {"width": values.shape[-1], "tapped": tapped, "done": done}
                with replacing(folder / "manifest.json") as manifest:
                    manifest.write(json.dumps(about | sizes, indent=1).encode())
                if progress is not None:
                    progress(done, count)
    except OSError as error:
        raise OSError(
            f"cannot write features to {folder} ({error}); {done} of {count} rows are "
            "there and usable. Make room and run it again to continue"
        ) from error
    return FeatureCache(folder)


def stored_taps(folder: str | Path, wanted: tuple[int, ...]) -> tuple[int, ...]:
    """The taps of the features in a folder if they contain ``wanted``, else ``wanted``.

    What to ask ``cache_features`` for, so that several methods share a folder.
    """
    if not (Path(folder) / "manifest.json").exists():
        return wanted
    stored = tuple(_manifest(Path(folder))["taps"])
    return stored if set(wanted) <= set(stored) else wanted


def fingerprint(target: Target, params: Any) -> str:
    """A hash of a model's config and of every bit of its weights."""
    digest = hashlib.sha256(repr(target.config).encode())
    for leaf in jax.tree.leaves(params):
        array = np.asarray(leaf)
        digest.update(f"{array.shape} {array.dtype.name}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _hash_rows(rows: Rows) -> str:
    digest = hashlib.sha256()
    for part in (rows.tokens, rows.document, rows.position):
        digest.update(np.ascontiguousarray(part).tobytes())
    return digest.hexdigest()


def _begin(folder: Path, about: dict) -> int:
    """Rows that are there already, of the same thing; drops what lies after them."""
    folder.mkdir(parents=True, exist_ok=True)
    done = size = 0
    if (folder / "manifest.json").exists():
        manifest = _manifest(folder)
        _compare(folder, manifest, about)
        done = manifest["done"]
        size = done * manifest["length"] * manifest["width"]
        size *= jnp.dtype(manifest["dtype"]).itemsize
    with open(folder / "features.bin", "ab") as file:
        if file.tell() < size:
            raise ValueError(
                f"{folder}/features.bin is shorter than the {done} rows of its "
                "manifest; delete the folder and run it again"
            )
        file.truncate(size)
    return done


def _compare(folder: Path, manifest: dict, about: dict) -> None:
    for name, value in about.items():
        if manifest.get(name) != value:
            raise ValueError(
                f"{folder} holds features with {name} {manifest.get(name)}, wanted "
                f"{value}; use another folder or delete this one"
            )


def _encoded(found: Features, keep: int, dtype: str) -> np.ndarray:
    """``[keep, T, F + M]`` in the file's dtype."""
    parts = [x for x in found if x is not None]
    values = np.concatenate([np.asarray(x[:keep], np.float32) for x in parts], -1)
    largest = float(np.abs(values).max())
    if dtype == "float16" and largest > 65504:
        raise ValueError(
            f"a feature of {largest:.3g} does not fit float16; use dtype bfloat16"
        )
    return values.astype(jnp.dtype(dtype))


def _manifest(folder: Path) -> dict:
    path = folder / "manifest.json"
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}; write it with cache_features")
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); delete it") from error
