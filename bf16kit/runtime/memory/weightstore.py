"""Stores for copied weights: in memory of this process, or in memory that several processes share.

Code that copies weights asks a :class:`WeightStore` for memory. The default is :data:`PRIVATE_STORE`; a program of
several processes passes a store of sealed memory (Linux: memfd) that none of them can change or truncate. They share it
by passing its descriptor.

Either kind starts at a multiple of 2 MiB, in pages of that size if the system has them: they are read a quarter to a
half faster (docs/decisions/0027-weights-in-memory.md). Most systems provide them for shared memory only on an
explicit request, for memory that is already allocated (``MADV_COLLAPSE``, Linux 6.1).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bf16kit.system import controlgroup

#: Writes all of the bytes it is given, and keeps no reference to them. It raises if the bytes cannot be right.
Fill = Callable[[NDArray[np.uint8]], None]
LARGE_PAGE = 2 << 20  # bytes, on x86-64 and on most of arm64
_MAP_FIXED = 0x10
_MADV_COLLAPSE = 25
_NOEXEC_SEAL = 0x8  # MFD_NOEXEC_SEAL, which Python has no name for
_NAME = "bf16kit-weights"  # in /proc/PID/maps
# With these seals neither size nor content can change; the last one forbids further seals, which are not needed. The
# kernel refuses F_SEAL_WRITE while the memory is mapped for writing.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class WeightStore(Protocol):
    """Keeps bytes by key, as long as an array that :meth:`get` returned, or a view of it, exists."""

    def get(self, key: str, size: int, fill: Fill) -> NDArray[np.uint8]:
        """Return ``size`` bytes (at least one) as ``fill`` writes them: aligned to a page, read-only.

        ``key`` identifies the content: callers with the same key and size would fill the memory with the same bytes.
        ``fill`` is not called if the bytes exist already. Raises what it raises; :class:`MemoryError` without room.
        """
        ...


class PrivateWeightStore:
    """A :class:`WeightStore` that shares nothing: new memory for each call, in large pages if the system has them."""

    def get(self, key: str, size: int, fill: Fill) -> NDArray[np.uint8]:
        """See :class:`WeightStore`."""
        check_room(size)
        _, memory = _map_private(size, mmap.PROT_READ | mmap.PROT_WRITE)
        _system().madvise(memory.ctypes.data, size // LARGE_PAGE * LARGE_PAGE, mmap.MADV_HUGEPAGE)
        fill(memory)
        memory.flags.writeable = False
        return memory


PRIVATE_STORE = PrivateWeightStore()


def create_filled(size: int, fill: Fill) -> int:
    """Return the descriptor of new sealed memory of ``size`` bytes that ``fill`` wrote.

    No process can write to it or change its size. Raises what ``fill`` raises, :class:`MemoryError` when there is no
    room, and :class:`OSError` when the system has no such memory.
    """
    check_room(size)
    descriptor = _memfd(os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with _explaining_no_room(size):
            os.ftruncate(descriptor, size)
            # Refuses a size that plainly exceeds the machine's memory; later the kernel would try, and kill processes.
            mapping, memory = _map_shared(descriptor, size, mmap.PROT_READ | mmap.PROT_WRITE)
            _collapse_into_large_pages(descriptor, memory)
            os.posix_fallocate(descriptor, 0, size)  # all of it now, so that touching it cannot fail
        fill(memory)
        del memory
        mapping.close()  # BufferError if a view still exists
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def map_read_only(descriptor: int, size: int) -> tuple[mmap.mmap, NDArray[np.uint8]]:
    """Map ``size`` bytes of sealed memory read-only; return the mapping and the array.

    A view keeps the mapping alive. Raises :class:`MemoryError` when there is no room in the address space.
    """
    return _map_shared(descriptor, size, mmap.PROT_READ)


def _map_private(size: int, protection: int) -> tuple[mmap.mmap, NDArray[np.uint8]]:
    """Map ``size`` bytes at the start of a large page; return the mapping and the array.

    Only memory that starts at a large page can be in large pages, and Python's ``mmap`` takes no address. So a little
    more is mapped. It is private: shared memory has large pages only if the administrator allows it.
    """
    with _explaining_no_room(size):
        mapping = mmap.mmap(-1, size + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=protection)
    buffer = np.frombuffer(mapping, np.uint8)
    start = -buffer.ctypes.data % LARGE_PAGE
    return mapping, buffer[start : start + size]


def _map_shared(descriptor: int, size: int, protection: int) -> tuple[mmap.mmap, NDArray[np.uint8]]:
    """Map the file over a part of private memory, at the start of a large page; both are unmapped together."""
    mapping, memory = _map_private(size, protection)
    address = memory.ctypes.data
    with _explaining_no_room(size):
        if _system().mmap(address, size, protection, mmap.MAP_SHARED | _MAP_FIXED, descriptor, 0) != address:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return mapping, memory


def _collapse_into_large_pages(descriptor: int, memory: NDArray[np.uint8]) -> None:
    """Move ``memory`` into large pages, except for the last partial one; pages stay small if that is impossible.

    The kernel makes a large page from the small pages that exist, and from zeros. One existing page each is enough, and
    at least six times as fast as writing them all.
    """
    large = memory.nbytes // LARGE_PAGE * LARGE_PAGE
    with contextlib.suppress(OSError):  # no room: allocating all of it reports that
        for start in range(0, large, LARGE_PAGE):
            os.pwrite(descriptor, b"\0", start)
        _system().madvise(memory.ctypes.data, large, _MADV_COLLAPSE)


def _system() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_ssize_t]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library


def check_room(size: int) -> None:
    """Raise :class:`MemoryError` if the container has no room for ``size`` more bytes of weights.

    Without this check the kernel would allow the attempt, and then kill the process.
    """
    memory = controlgroup.memory()
    if memory is not None and not memory.has_room(size):
        raise MemoryError(f"no room for {size / 1e6:.0f} MB of weights: {memory}")


def _memfd(flags: int) -> int:
    with contextlib.suppress(OSError):  # older kernels do not know the flag; hardened ones insist (vm.memfd_noexec)
        return os.memfd_create(_NAME, flags | _NOEXEC_SEAL)
    return os.memfd_create(_NAME, flags)


@contextlib.contextmanager
def _explaining_no_room(size: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise MemoryError(f"no room for {size / 1e6:.0f} MB of weights: {error.strerror}") from error
        raise
