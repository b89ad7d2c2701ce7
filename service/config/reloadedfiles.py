"""Files that are read again when they change on disk."""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
CHECK_SECONDS = 1.0  # between two checks of the files


class ReloadedFiles(Generic[_T]):
    """The value that ``read`` makes of ``paths``. The constructor reads it, and passes on what ``read`` raises.

    A thread checks the files every :data:`CHECK_SECONDS`, and reads again if one has changed; so a volume that hangs
    blocks nobody who needs the value. When reading fails the last good value stays in force, and an error about
    ``name`` is logged once for each change. The value keeps its identity until the files change. The thread ends when
    this object is no longer used.
    """

    def __init__(self, name: str, paths: tuple[Path, ...], read: Callable[[], _T]) -> None:
        self._name = name
        self._paths = paths
        self._read = read
        self._signature = self._current_signature()
        self._value = read()
        threading.Thread(target=_watch, args=(weakref.ref(self),), name="files", daemon=True).start()

    def current(self) -> _T:
        return self._value

    def check(self) -> None:
        """Read again if a file has changed. For the watching thread."""
        signature = self._current_signature()
        if signature != self._signature:
            try:
                self._value = self._read()
            except Exception as error:  # noqa: BLE001 -- a half-written file must not end the server
                _log.error("%s cannot be read again; the old ones stay in force: %s", self._name, error)
            # The signature is older than the read: a change during the read causes another read.
            self._signature = signature

    def _current_signature(self) -> tuple[object, ...]:
        return tuple(_signature(path) for path in self._paths)


def _watch(watched: weakref.ref[ReloadedFiles[_T]]) -> None:
    while True:
        time.sleep(CHECK_SECONDS)
        if (files := watched()) is None:
            return
        files.check()
        del files  # not kept in use by this thread


def read_regular(path: Path, most_bytes: int) -> tuple[bytes, int]:
    """Return the first ``most_bytes`` bytes of a file, and its mode. Raises OSError if it is not a regular file.

    A pipe or a device in its place is not waited for.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(most_bytes), mode
    finally:
        os.close(descriptor)


def _signature(path: Path) -> object:
    """Return a value that differs if the file was rewritten, replaced, or is behind a link that was changed."""
    try:
        found = path.stat()
    except OSError as error:
        return error.errno
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
