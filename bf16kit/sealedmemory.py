"""Memory that several processes map, and that none of them can change or cut short once it is sealed (Linux: memfd).

Whoever hands such memory on hands on its descriptor; whoever gets one calls :func:`check` before use.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator

from bf16kit import controlgroup

_NAME = "bf16kit-weights"  # in /proc/PID/maps
_MFD_NOEXEC_SEAL = 0x8  # Linux 6.3; a system may refuse memory that could become a program (vm.memfd_noexec)
_FULL = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG)
# What bears these stays as long as it is, and what is in it; the last one forbids to add seals, which nobody needs.
# F_SEAL_WRITE is refused while anybody maps the memory for writing.
_SEALS = {
    "F_SEAL_SHRINK": fcntl.F_SEAL_SHRINK,
    "F_SEAL_GROW": fcntl.F_SEAL_GROW,
    "F_SEAL_WRITE": fcntl.F_SEAL_WRITE,
    "F_SEAL_SEAL": fcntl.F_SEAL_SEAL,
}


class UnfitMemory(Exception):
    """A descriptor is not of sealed memory of the size expected; the message says what it lacks."""


def check_room(size: int) -> None:
    """Raises :class:`MemoryError` where the container may not take ``size`` bytes of weights more: the system would let
    it try, and end it."""
    memory = controlgroup.memory()
    if memory is not None and not memory.has_room(size):
        raise MemoryError(f"no room for {size / 1e6:.0f} MB of weights: {memory}")


def create(size: int) -> int:
    """The descriptor of new memory of ``size`` bytes, zeros, whose room is yet to be taken: :func:`reserve`.

    Raises :class:`MemoryError` where there is no room, :class:`OSError` where the system has no such memory.
    """
    check_room(size)
    try:
        # What is plainly more than the machine has is refused here; later the system would try, and end processes.
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError as error:
        raise no_room(size, error) from error
    descriptor = _memfd()
    try:
        with _room(size):
            os.ftruncate(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def reserve(descriptor: int, size: int) -> None:
    """Take the room of all ``size`` bytes now: nobody who touches them finds none. Raises as :func:`create` does."""
    with _room(size):
        os.posix_fallocate(descriptor, 0, size)


@contextlib.contextmanager
def _room(size: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise no_room(size, error) from error
        raise


def no_room(size: int, error: OSError) -> MemoryError:
    """What to raise where ``error`` says that there is no room for ``size`` bytes."""
    return MemoryError(f"no room for {size / 1e6:.0f} MB of weights: {error.strerror}")


def seal(descriptor: int) -> None:
    """Forbid everybody, for good, to write to the memory or to change its size. OSError while it is mapped for
    writing."""
    seals = 0
    for each in _SEALS.values():
        seals |= each
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)


def check(descriptor: int, size: int) -> None:
    """Raises :class:`UnfitMemory` unless ``descriptor`` is of memory of ``size`` bytes that is sealed."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        found = os.fstat(descriptor).st_size
    except OSError as error:
        raise UnfitMemory(f"it is not memory that can be sealed ({error.strerror})") from error
    missing = [name for name, bit in _SEALS.items() if not seals & bit]
    if missing:
        raise UnfitMemory(f"it is not sealed: {', '.join(missing)} missing")
    if found != size:
        raise UnfitMemory(f"it has {found} bytes, and {size} were to be expected")


def _memfd() -> int:
    with contextlib.suppress(OSError):  # an older system does not know the flag
        return os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | _MFD_NOEXEC_SEAL)
    return os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
