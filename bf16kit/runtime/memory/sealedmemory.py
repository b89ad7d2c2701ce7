"""Memory that several processes map, and that none of them can change or truncate once it is sealed (Linux: memfd).

Processes share it by passing its descriptor. The receiver calls :func:`check` before use.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator

from bf16kit.system import controlgroup

_NAME = "bf16kit-weights"  # in /proc/PID/maps
_MFD_NOEXEC_SEAL = 0x8  # Linux 6.3; a system may refuse memory that could be made executable (vm.memfd_noexec)
_FULL = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG)
# With these seals neither size nor content can change; the last one forbids further seals, which are not needed. The
# kernel refuses F_SEAL_WRITE while the memory is mapped for writing.
_SEALS = {
    "F_SEAL_SHRINK": fcntl.F_SEAL_SHRINK,
    "F_SEAL_GROW": fcntl.F_SEAL_GROW,
    "F_SEAL_WRITE": fcntl.F_SEAL_WRITE,
    "F_SEAL_SEAL": fcntl.F_SEAL_SEAL,
}


class UnfitMemory(Exception):
    """A descriptor is not sealed memory of the expected size; the message says what is wrong."""


def check_room(size: int) -> None:
    """Raise :class:`MemoryError` if the container has no room for ``size`` more bytes of weights.

    Without this check the kernel would allow the attempt, and then kill the process.
    """
    memory = controlgroup.memory()
    if memory is not None and not memory.has_room(size):
        raise MemoryError(f"no room for {size / 1e6:.0f} MB of weights: {memory}")


def create(size: int) -> int:
    """Return the descriptor of new zeroed memory of ``size`` bytes, to be allocated by :func:`reserve`.

    Raises :class:`MemoryError` when there is no room, :class:`OSError` when the system has no such memory.
    """
    check_room(size)
    try:
        # Refuses a size that plainly exceeds the machine's memory; later the kernel would try, and kill processes.
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError as error:
        raise no_room_error(size, error) from error
    descriptor = _memfd()
    try:
        with _explaining_no_room(size):
            os.ftruncate(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def reserve(descriptor: int, size: int) -> None:
    """Allocate all ``size`` bytes now, so that touching them cannot fail. Raises as :func:`create` does."""
    with _explaining_no_room(size):
        os.posix_fallocate(descriptor, 0, size)


@contextlib.contextmanager
def _explaining_no_room(size: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise no_room_error(size, error) from error
        raise


def no_room_error(size: int, error: OSError) -> MemoryError:
    """Return the error to raise when ``error`` says that there is no room for ``size`` bytes."""
    return MemoryError(f"no room for {size / 1e6:.0f} MB of weights: {error.strerror}")


def seal(descriptor: int) -> None:
    """Forbid all processes, permanently, to write to the memory or change its size.

    OSError while it is mapped for writing.
    """
    seals = 0
    for each in _SEALS.values():
        seals |= each
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)


def check(descriptor: int, size: int) -> None:
    """Raise :class:`UnfitMemory` unless ``descriptor`` is sealed memory of ``size`` bytes."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        found = os.fstat(descriptor).st_size
    except OSError as error:
        raise UnfitMemory(f"it is not memory that can be sealed ({error.strerror})") from error
    missing = [name for name, bit in _SEALS.items() if not seals & bit]
    if missing:
        raise UnfitMemory(f"it is not sealed: {', '.join(missing)} missing")
    if found != size:
        raise UnfitMemory(f"it has {found} bytes, expected {size}")


def _memfd() -> int:
    with contextlib.suppress(OSError):  # older kernels do not know the flag
        return os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | _MFD_NOEXEC_SEAL)
    return os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
