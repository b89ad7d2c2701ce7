"""Sealed memory for weights, mapped at a multiple of 2 MiB and in pages of that size if possible.

Most systems do not use large pages for shared memory (``shmem_enabled`` is ``never``). They still provide them on an
explicit request for memory that is already allocated (``MADV_COLLAPSE``, Linux 6.1).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

import numpy as np
from numpy.typing import NDArray

from bf16kit.runtime.memory.ownmemory import LARGE_PAGE
from bf16kit.runtime.memory.sealedmemory import create, no_room_error, reserve, seal
from bf16kit.runtime.memory.weightstore import Fill

_MAP_FIXED = 0x10
_MADV_COLLAPSE = 25


def create_filled(size: int, fill: Fill) -> int:
    """Return the descriptor of new sealed memory of ``size`` bytes that ``fill`` wrote.

    Raises the errors of :func:`bf16kit.runtime.memory.sealedmemory.create` and of ``fill``.
    """
    descriptor = create(size)
    try:
        mapping, memory = _map_at_large_page(descriptor, size, mmap.PROT_READ | mmap.PROT_WRITE)
        _collapse_into_large_pages(descriptor, memory)
        reserve(descriptor, size)
        fill(memory)
        del memory
        mapping.close()  # BufferError if a view still exists
        seal(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def map_read_only(descriptor: int, size: int) -> tuple[mmap.mmap, NDArray[np.uint8]]:
    """Map ``size`` bytes of sealed memory read-only; return the mapping and the array.

    A view keeps the mapping alive.
    """
    return _map_at_large_page(descriptor, size, mmap.PROT_READ)


def _map_at_large_page(descriptor: int, size: int, protection: int) -> tuple[mmap.mmap, NDArray[np.uint8]]:
    """Map ``size`` bytes at the start of a large page; return the mapping and the array.

    Only memory that starts at a large page can be in large pages, and Python's ``mmap`` takes no address. So this
    reserves a little more and maps the file over a part of it; both are unmapped together.

    Raises :class:`MemoryError` when there is no room in the address space.
    """
    try:
        reserved = mmap.mmap(-1, size + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=protection)
    except OSError as error:
        raise no_room_error(size, error) from error
    buffer = np.frombuffer(reserved, np.uint8)
    start = -buffer.ctypes.data % LARGE_PAGE
    address = buffer.ctypes.data + start
    system = _system()
    if system.mmap(address, size, protection, mmap.MAP_SHARED | _MAP_FIXED, descriptor, 0) != address:
        code = ctypes.get_errno()
        raise no_room_error(size, OSError(code, os.strerror(code)))
    return reserved, buffer[start : start + size]


def _collapse_into_large_pages(descriptor: int, memory: NDArray[np.uint8]) -> None:
    """Move ``memory`` into large pages, except for the last partial one; pages stay small if that is impossible.

    The kernel makes a large page from the small pages that exist, and from zeros. One existing page each is enough, and
    at least six times as fast as writing them all.
    """
    large = memory.nbytes // LARGE_PAGE * LARGE_PAGE
    if not large:
        return
    with contextlib.suppress(OSError):  # no room: reserve() reports that
        for start in range(0, large, LARGE_PAGE):
            os.pwrite(descriptor, b"\0", start)
        _system().madvise(memory.ctypes.data, large, _MADV_COLLAPSE)


def _system() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_ssize_t]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library
