"""Ways to damage the files of a checkpoint."""

from __future__ import annotations

import json
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Damage:
    """One accident.

    Args:
      kind: A key of `DAMAGES`.
      which: To which of the files or directories, from 0 to 1.
      where: In which part of it, from 0 to 1.
    """

    kind: str
    which: float
    where: float

    def apply(self, checkpoint: Path) -> None:
        """Damage a checkpoint."""
        DAMAGES[self.kind](checkpoint, self.which, self.where)

    def __str__(self) -> str:
        return f"{self.kind} ({self.which:.4f}, {self.where:.4f})"


def _chosen(checkpoint: Path, which: float, wanted: Callable[[Path], bool] = Path.is_file) -> Path:
    # Some files get random names, so these come last in the order.
    paths = sorted(
        (path for path in checkpoint.rglob("*") if wanted(path)),
        key=lambda path: (path.parent, path.stat().st_size, path),
    )
    return paths[int(which * len(paths))]


def _rewrite(change: Callable[[bytearray, int], bytes]) -> Callable[[Path, float, float], None]:
    def damage(checkpoint: Path, which: float, where: float) -> None:
        path = _chosen(checkpoint, which)
        content = bytearray(path.read_bytes())
        path.write_bytes(change(content, int(where * len(content))))

    return damage


def _flip(content: bytearray, place: int) -> bytes:
    if content:
        content[place] ^= 1 << place % 8
    return content


def _remove(checkpoint: Path, which: float, where: float) -> None:
    _chosen(checkpoint, which).unlink()


def _remove_directory(checkpoint: Path, which: float, where: float) -> None:
    shutil.rmtree(_chosen(checkpoint, which, Path.is_dir))


def _exchange(checkpoint: Path, which: float, where: float) -> None:
    one, other = _chosen(checkpoint, which), _chosen(checkpoint, where)
    if one != other:
        aside = one.with_name("aside")
        one.rename(aside)
        other.rename(one)
        aside.rename(other)


def _overwrite(checkpoint: Path, which: float, where: float) -> None:
    content = _chosen(checkpoint, where).read_bytes()
    _chosen(checkpoint, which).write_bytes(content)


def _make_directory(checkpoint: Path, which: float, where: float) -> None:
    (path := _chosen(checkpoint, which)).unlink()
    path.mkdir()


def _make_fifo(checkpoint: Path, which: float, where: float) -> None:
    (path := _chosen(checkpoint, which)).unlink()
    os.mkfifo(path)  # whoever opens it waits for somebody who writes


def _make_link(checkpoint: Path, which: float, where: float) -> None:
    (path := _chosen(checkpoint, which)).unlink()
    path.symlink_to(path if where < 0.5 else "nowhere")


def _link_directory(checkpoint: Path, which: float, where: float) -> None:
    path = _chosen(checkpoint, which, Path.is_dir)
    shutil.rmtree(path)
    path.symlink_to(".")


def _add(checkpoint: Path, which: float, where: float) -> None:
    path = _chosen(checkpoint, which)
    path.with_name(f"{path.name}.orig").write_bytes(b"foreign")


def _forge(checkpoint: Path, which: float, where: float) -> None:
    """Change something in the manifest, and its checksum with it."""
    file = checkpoint / "manifest" / "metadata"
    manifest = json.loads(file.read_text())
    content = manifest["content"]
    places = list(_places(content))
    nest, key = places[int(which * len(places))]
    nest[key] = _FORGERIES[int(where * len(_FORGERIES))]
    manifest["checksum"] = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    file.write_text(json.dumps(manifest))


def _places(nest: Any) -> Iterator[tuple[Any, Any]]:
    keys = list(nest) if isinstance(nest, dict) else range(len(nest))
    for key in keys:
        yield nest, key
        if isinstance(nest[key], (dict, list)):
            yield from _places(nest[key])


_FORGERIES: list[Any] = [
    *(None, True, -1, 0, 1, 10**30, -(10**30), 1.5, math.nan, math.inf, "", "x", "9" * 5000),
    *([], [[]], {}, {"a": 1}),
]
FORGED = "manifest forged"
DAMAGES: dict[str, Callable[[Path, float, float], None]] = {
    "bit flipped": _rewrite(_flip),
    "cut off": _rewrite(lambda content, place: content[:place]),
    "begins late": _rewrite(lambda content, place: content[place + 1 :]),
    "zeroed from": _rewrite(lambda content, place: content[:place] + bytes(len(content) - place)),
    "grown": _rewrite(lambda content, place: content + content[:place]),
    "emptied": _rewrite(lambda content, place: b""),
    "file removed": _remove,
    "directory removed": _remove_directory,
    "files exchanged": _exchange,
    "file overwritten by another": _overwrite,
    "directory in place of a file": _make_directory,
    "FIFO in place of a file": _make_fifo,
    "dangling link in place of a file": _make_link,
    "looping link in place of a directory": _link_directory,
    "foreign file added": _add,
    FORGED: _forge,
}
