"""Chips that are not there: what cannot be had is refused by name."""

import pytest

from jspec import topology


@pytest.mark.parametrize("mesh", [topology.tpu_mesh, topology.gpu_mesh])
def test_an_unknown_chip_is_named(mesh):
    with pytest.raises(ValueError, match="'z80' is not one of"):
        mesh("z80")


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(topology, "installed", lambda: False)
    monkeypatch.setattr(topology, "cuda_installed", lambda: False)
    with pytest.raises(RuntimeError, match="needs libtpu: pip install"):
        topology.tpu_mesh("v5e")
    with pytest.raises(RuntimeError, match="jax-cuda13-plugin"):
        topology.gpu_mesh("h100")


def test_a_package_whose_parent_is_missing_is_not_installed():
    assert not topology._found("there_is_no_such.package")
    assert topology._found("jax.numpy")
