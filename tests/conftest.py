"""Settings common to all tests."""

import gc

import jax
import pytest
from hypothesis import settings

# The first example compiles; a deadline would measure XLA.
settings.register_profile("jspec", deadline=None)
settings.load_profile("jspec")


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Drops a module's compiled programs when it is done.

    Every program of XLA:CPU holds memory mappings, and the kernel allows a process
    65,530 of them: the whole suite in one process would run out and crash compiling.
    """
    yield
    jax.clear_caches()
    gc.collect()
