"""Saves a second checkpoint, and tries what a kill at any moment of that would leave behind.

Whenever the process is about to touch a file, the directory is copied: that is what is there if it
is killed in this moment.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

import replicax as rx

TOUCHING = ("open", "os.", "shutil.")


class Photographer:
    def __init__(self, directory: Path, album: Path) -> None:
        self._directory, self._album = directory, album
        self._active = False
        self.moments: list[str] = []
        sys.addaudithook(self._audit)

    def __enter__(self) -> None:
        self._active = True

    def __exit__(self, *_: object) -> None:
        self._active = False

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        touched = arguments and str(self._directory) in str(arguments[0])
        if self._active and event.startswith(TOUCHING) and touched:
            self._active = False
            with contextlib.suppress(shutil.Error):  # a file that another thread has just removed
                shutil.copytree(self._directory, self._album / str(len(self.moments)))
            self.moments.append(f"{event} {str(arguments[0]).removeprefix(str(self._directory))}")
            self._active = True


def main(directory: Path) -> None:
    (run := directory / "run").mkdir()
    photographer = Photographer(run, directory / "album")
    checkpoint = rx.Checkpoint(number=1, array=np.float32([1.0, 1.0]))
    with rx.CheckpointManager(checkpoint, run, max_to_keep=1) as manager:
        manager.save()
        manager.sync()
        checkpoint.number, checkpoint.array = 2, np.float32([2.0, 2.0])
        with photographer:
            manager.save()
            manager.sync()
    found = []
    for moment, name in enumerate(photographer.moments):
        other = rx.Checkpoint(number=0, array=np.float32([0.0, 0.0]))
        with rx.CheckpointManager(other, directory / "album" / str(moment)) as manager:
            manager.restore_or_initialize()
            assert other.array.tolist() == [other.number] * 2, name
            found.append(other.number)
            manager.save()  # and it can go on
        assert len(list((directory / "album" / str(moment)).iterdir())) <= 3, name
    print(json.dumps({"moments": photographer.moments, "found": found}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
