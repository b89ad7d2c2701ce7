"""Digests of the files in one directory; a file is read again only when it changes."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from pathlib import Path

from bf16kit.artifact.manifest import FileEntry
from bf16kit.artifact.reading import open_inside
from bf16kit.messages.errors import ArtifactDamaged

_Stamp = tuple[int, int, int, int]  # inode, size, modification and change time

# File systems take timestamps from the kernel's coarse clock, which ticks every 1 to 10 ms: two writes within one tick
# get the same timestamp.
_TICK_NS = 20_000_000


@dataclass(slots=True)
class Digests:
    """Cached digests by path; a file is read again when its inode, size or times change."""

    _known: dict[Path, tuple[_Stamp, FileEntry]] = field(default_factory=dict)

    def entry(self, path: Path) -> FileEntry:
        """Return digest and size of ``path``; the file is read when it is new or has changed."""
        stamp = _stamp(path)  # taken before reading: a file that changes meanwhile is read again
        known = self._known.get(path)
        if known is not None and known[0] == stamp:
            return known[1]
        _wait_for_next_tick(stamp)
        entry = _read(path)
        self._known[path] = (stamp, entry)
        return entry


def _stamp(path: Path) -> _Stamp:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _wait_for_next_tick(stamp: _Stamp) -> None:
    """Sleep until a later change would get another stamp; return at once for files older than a tick."""
    age = time.time_ns() - stamp[3]
    if 0 <= age < _TICK_NS:
        time.sleep((_TICK_NS - age) / 1e9)


def _read(path: Path) -> FileEntry:
    digest = hashlib.sha256()
    size = 0
    with open_inside(path, ArtifactDamaged) as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
            size += len(chunk)
    return FileEntry(sha256=digest.hexdigest(), bytes=size)
