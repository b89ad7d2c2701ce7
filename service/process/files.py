"""Files that are read again when they change on disk, and how many may be open."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

_T = TypeVar("_T")
LOOK_SECONDS = 1.0  # how often the files are looked at, at most: a stat for each request would be wasted
_MOST_OPEN_FILES = 65_536


def allow_open_files() -> None:
    """Raise this process's soft limit of open files: many systems set 1,024, which idle connections would use up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Watched(Generic[_T]):
    """What ``read`` makes of ``paths``. It is read here for the first time, and what it raises then goes to the caller.

    Later, when a file has changed, :meth:`current` reads again. What cannot be read or used leaves the last good value
    in force, and ``failed`` is told once for each change. The value keeps its identity until the files change.
    """

    def __init__(
        self,
        paths: tuple[Path, ...],
        read: Callable[[], _T],
        failed: Callable[[Exception], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths = paths
        self._read = read
        self._failed = failed
        self._clock = clock
        self._lock = threading.Lock()
        self._signature = self._look()
        self._looked = clock()
        self._value = read()

    def current(self) -> _T:
        if self._clock() - self._looked >= LOOK_SECONDS and self._lock.acquire(blocking=False):
            try:
                self._refresh()
            finally:
                self._lock.release()
        return self._value

    def _refresh(self) -> None:
        self._looked = self._clock()
        signature = self._look()
        if signature == self._signature:
            return
        try:
            self._value = self._read()
        except Exception as error:  # noqa: BLE001 -- a half-written file must not end the server
            self._failed(error)
        # The signature from before the reading: what changed meanwhile is read once more.
        self._signature = signature

    def _look(self) -> tuple[object, ...]:
        return tuple(_signature(path) for path in self._paths)


def _signature(path: Path) -> object:
    """Another value whenever the file is another: rewritten, renamed over, or behind a link that was turned."""
    try:
        found = path.stat()
    except OSError as error:
        return error.errno
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
