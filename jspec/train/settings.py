"""The settings of a folder that is written in several goes."""

from __future__ import annotations

import json
from pathlib import Path

from jspec.train.atomic import replacing


def remember(folder: Path, settings: dict) -> None:
    """Writes ``run.json`` into a new folder; compares it in one that is continued.

    Raises:
      ValueError: the folder was begun with other settings; the message names them.
      OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.json"
    wanted = json.loads(json.dumps(settings))
    if not path.exists():
        with replacing(path) as file:
            file.write(json.dumps(wanted, indent=1).encode())
        return
    there = json.loads(path.read_text())
    for name in sorted(wanted.keys() | there.keys()):
        if wanted.get(name) != there.get(name):
            raise ValueError(
                f"{folder} was begun with {name} {there.get(name)}, not "
                f"{wanted.get(name)}; continue it with the same settings, or choose "
                "another folder"
            )
