"""A temporary file that ONNX Runtime maps: its pages are the system's to take back, where arrays in memory are not."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_PREFIX = ".bf16kit-weights-"
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


class NoScratch(Exception):
    """There is no room for a temporary file; the message says where and why."""


@contextmanager
def scratch_file(
    size: int, directory: Path | None = None, *, in_memory: bool = False
) -> Iterator[tuple[Path, NDArray[np.uint8]]]:
    """A file of ``size`` bytes in ``directory`` (None: the system's), mapped for writing; it has no name afterwards.

    Whoever opened or mapped it within the block keeps it. Its process holds a lock on it: one that a killed process
    left is removed by the next that comes here. Raises :class:`NoScratch` when the directory cannot be written, lacks
    the room, which is taken at once, or lies in memory itself and ``in_memory`` does not allow that.
    """
    directory = _usable(directory, in_memory)
    _remove_stale(directory)
    with contextlib.ExitStack() as stack:
        yield _mapped_file(stack, directory, size)  # not in a variable: the caller may let go of the mapping


def _mapped_file(stack: contextlib.ExitStack, directory: Path, size: int) -> tuple[Path, NDArray[np.uint8]]:
    """A new file, closed and without its name when ``stack`` is left, and its mapping."""
    try:
        descriptor, name = _locked_file(directory)
        stack.callback(os.close, descriptor)
        stack.callback(Path(name).unlink, missing_ok=True)
        os.posix_fallocate(descriptor, 0, size)  # a page that finds no room when it is written kills the process
        return Path(name), np.memmap(name, np.uint8, mode="r+", shape=(size,)).view(np.ndarray)
    except OSError as error:
        room = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        why = f"has no room for {size / 1e6:.0f} MB" if room else f"cannot be used ({error.strerror})"
        raise NoScratch(f"{directory} {why}") from error


def _locked_file(directory: Path) -> tuple[int, str]:
    """A new file, and the lock on it; again where another process took it for a stale one before it was locked."""
    while True:
        descriptor, name = tempfile.mkstemp(prefix=_PREFIX, dir=directory)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                return descriptor, name
        except BaseException:
            os.close(descriptor)
            Path(name).unlink(missing_ok=True)
            raise
        os.close(descriptor)


def on_disk(directory: Path | None = None) -> Path:
    """Where temporary files go that memory is to be spared: ``directory``, unless it lies in memory itself.

    Then, and for None, the system's directory; where that lies in memory, too, ``directory`` all the same.
    """
    if directory is not None and not _in_memory(directory):
        return directory
    try:
        system = Path(tempfile.gettempdir())
    except FileNotFoundError:
        if directory is None:
            raise
        return directory
    return directory if directory is not None and _in_memory(system) else system


def _in_memory(directory: Path) -> bool:
    return _file_system(directory.resolve()) in _IN_MEMORY


def _usable(directory: Path | None, in_memory: bool) -> Path:
    try:
        found = (directory or Path(tempfile.gettempdir())).resolve()
    except FileNotFoundError:  # nothing that tempfile knows of can be written
        raise NoScratch("no directory for temporary files can be written") from None
    if not in_memory and _in_memory(found):
        raise NoScratch(f"{found} lies in memory")
    return found


def _file_system(directory: Path) -> str:
    """The type of the file system that ``directory`` is on, "" where the system does not tell."""
    best, found = -1, ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            mount, _, source = line.partition(" - ")
            point = Path(mount.split()[4].encode().decode("unicode_escape"))
            if directory.is_relative_to(point) and len(point.parts) >= best:  # the last of several at one point
                best, found = len(point.parts), source.split()[0]
    return found


def _remove_stale(directory: Path) -> None:
    """Remove what killed processes left; a living one holds its lock, another user's cannot be opened."""
    for path in directory.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)
