"""A temporary file that ONNX Runtime maps: unlike arrays in memory, the system can reclaim its pages."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_PREFIX, _NEW = ".bf16kit-weights-", ".bf16kit-new-"
_IN_MEMORY = (0x01021994, 0x858458F6)  # TMPFS_MAGIC and RAMFS_MAGIC of linux/magic.h


class ScratchUnavailable(Exception):
    """There is no room for a temporary file; the message says where and why."""


@contextmanager
def scratch_file(
    size: int, directory: Path | None = None, *, in_memory: bool = False
) -> Iterator[tuple[Path, NDArray[np.uint8]]]:
    """Create a file of ``size`` bytes in ``directory``, mapped for writing; leaving removes its name.

    ``directory`` None is the system's. A descriptor or mapping that was opened within the block stays valid. The
    process locks the file while it has a name, so that the next call can remove a file that a killed process left.
    Raises :class:`ScratchUnavailable` when the directory cannot be written, lacks the room, which is reserved at once,
    or is in memory and ``in_memory`` is false.
    """
    try:
        directory = (directory or Path(tempfile.gettempdir())).resolve()
    except FileNotFoundError:  # tempfile found no directory that it can write
        raise ScratchUnavailable("no directory for temporary files can be written") from None
    if not in_memory and _in_memory(directory):
        raise ScratchUnavailable(f"{directory} lies in memory")
    _remove_stale(directory)
    with contextlib.ExitStack() as stack:
        yield _mapped_file(stack, directory, size)  # not stored in a variable, so that the caller can drop the mapping


def _mapped_file(stack: contextlib.ExitStack, directory: Path, size: int) -> tuple[Path, NDArray[np.uint8]]:
    """Create and map a file; leaving ``stack`` closes it and removes its name."""
    try:
        # Under this name, and until it is locked, no other process takes the file for stale.
        descriptor, new = tempfile.mkstemp(prefix=_NEW, dir=directory)
        stack.callback(os.close, descriptor)
        path = directory / Path(new).name.replace(_NEW, _PREFIX)
        stack.callback(path.unlink, missing_ok=True)
        stack.callback(Path(new).unlink, missing_ok=True)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        Path(new).rename(path)
        os.posix_fallocate(descriptor, 0, size)  # otherwise a page without room kills the process when it is written
        return path, np.memmap(path, np.uint8, mode="r+", shape=(size,)).view(np.ndarray)
    except OSError as error:
        room = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        reason = f"has no room for {size / 1e6:.0f} MB" if room else f"cannot be used ({error.strerror})"
        raise ScratchUnavailable(f"{directory} {reason}") from error


def on_disk(directory: Path | None = None) -> Path:
    """Return the directory for temporary files that must not use memory: ``directory`` if it is on a disk.

    Otherwise, and for None, the system's directory; but ``directory`` if the system's is in memory, too.
    """
    if directory is None:
        return Path(tempfile.gettempdir())
    if _in_memory(directory):
        with contextlib.suppress(FileNotFoundError):  # no directory for temporary files can be written
            system = Path(tempfile.gettempdir())
            return directory if _in_memory(system) else system
    return directory


def _in_memory(directory: Path) -> bool:
    """Return whether ``directory`` is on a tmpfs or a ramfs; False if the system does not say."""
    found = (ctypes.c_long * 64)()  # a struct statfs, which begins with the type, and has room to spare
    ctypes.CDLL(None).statfs(os.fsencode(directory), found)
    return found[0] in _IN_MEMORY


def _remove_stale(directory: Path) -> None:
    """Remove the files of killed processes; a live process holds its lock, and other users' files cannot be opened."""
    for path in directory.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)
