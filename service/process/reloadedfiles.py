"""Files that are read again when they change on disk, and the limit of open files."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

_T = TypeVar("_T")
CHECK_SECONDS = 1.0  # the least time between two checks of the files: a stat per request would be waste
_MOST_OPEN_FILES = 65_536


def raise_open_file_limit() -> None:
    """Raise the soft limit of open files: the usual 1,024 would be used up by idle connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class ReloadedFiles(Generic[_T]):
    """The value that ``read`` makes of ``paths``. The constructor reads it, and passes on what ``read`` raises.

    Later, :meth:`current` reads again if a file has changed. If that fails, the last good value stays in force, and
    ``on_error`` is called once per change. The value keeps its identity until the files change.
    """

    def __init__(
        self,
        paths: tuple[Path, ...],
        read: Callable[[], _T],
        on_error: Callable[[Exception], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths = paths
        self._read = read
        self._on_error = on_error
        self._clock = clock
        self._lock = threading.Lock()
        self._signature = self._current_signature()
        self._checked_at = clock()
        self._value = read()

    def current(self) -> _T:
        if self._clock() - self._checked_at >= CHECK_SECONDS and self._lock.acquire(blocking=False):
            try:
                self._refresh()
            finally:
                self._lock.release()
        return self._value

    def _refresh(self) -> None:
        self._checked_at = self._clock()
        signature = self._current_signature()
        if signature == self._signature:
            return
        try:
            self._value = self._read()
        except Exception as error:  # noqa: BLE001 -- a half-written file must not end the server
            self._on_error(error)
        # The signature is older than the read: a change during the read causes another read.
        self._signature = signature

    def _current_signature(self) -> tuple[object, ...]:
        return tuple(_signature(path) for path in self._paths)


def _signature(path: Path) -> object:
    """Return a value that differs if the file was rewritten, replaced, or is behind a link that was changed."""
    try:
        found = path.stat()
    except OSError as error:
        return error.errno
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
