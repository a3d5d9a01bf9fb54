"""JAX's persistent compilation cache: the second start of a program compiles nothing.

Commands and experiments turn it on. Importing jspec does not, for a library should not
change a setting of the whole process.
"""

from __future__ import annotations

import os
from pathlib import Path

import jax

from jspec.models.aliases import cache_root


def enable_cache() -> Path:
    """Keeps compiled programs in ``$JSPEC_CACHE``, else in the user's cache directory.

    Programs are told apart by JAX version, device and compiler flags as well, so the
    folder can be shared and may be deleted at any time. A folder that the user chose
    with ``JAX_COMPILATION_CACHE_DIR`` is kept.

    Returns:
      The folder.
    """
    chosen = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    folder = Path(chosen) if chosen else cache_root() / "compiled"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Every program is worth keeping: a start waits for dozens of small ones.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder
