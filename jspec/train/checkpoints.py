"""Training states on disk: the last two, each whole or not there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Self

import jax
from orbax.checkpoint import v1 as ocp

_KEEP = 2  # while one is written, and if it cannot be, the one before is intact


class Checkpoints:
    """A folder with one checkpoint a saved step; use it as a context."""

    def __init__(self, folder: Path):
        """Opens or makes the folder; what a killed save left is removed.

        Raises:
          OSError: it cannot be made.
        """
        self._folder = folder.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        policies = ocp.training.preservation_policies
        self._orbax = ocp.training.Checkpointer(
            str(self._folder),
            # Orbax's own policies do not meet its annotation.
            preservation_policy=policies.LatestN(_KEEP),  # pyright: ignore
            cleanup_tmp_directories=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self._orbax.close()

    @property
    def latest(self) -> int | None:
        """The last saved step, or None."""
        found = self._orbax.latest
        return None if found is None else found.step

    def save(self, step: int, state: Any) -> None:
        """Saves a pytree of arrays; nothing is done if that step is there already.

        Raises:
          OSError: it cannot be written; the checkpoints before it are intact.
        """
        if self.latest == step:
            return
        try:
            self._orbax.save(step, state, force=True)
        except Exception as error:  # storage errors reach us under several types
            self._drop_partial()
            raise OSError(
                f"cannot save step {step} in {self._folder} ({_reason(error)}); the "
                f"last checkpoint is of step {self.latest}. Make room and run the same "
                "command again"
            ) from error

    def load(self, like: Any) -> Any:
        """The latest state, with the structure, types and placement of ``like``.

        Raises:
          ValueError: what was saved has another structure or other shapes.
        """
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
        )
        try:
            return self._orbax.load(abstract_state=abstract)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"the checkpoint of step {self.latest} in {self._folder} is of other "
                f"parameters or of another optimizer ({_reason(error)}); choose another "
                "folder, or delete this one to start anew"
            ) from error

    def _drop_partial(self) -> None:
        for left in self._folder.glob("*orbax-checkpoint-tmp*"):
            shutil.rmtree(left, ignore_errors=True)


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
