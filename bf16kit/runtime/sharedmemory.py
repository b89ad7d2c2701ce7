"""Sealed memory, mapped where weights are read: from a multiple of 2 MiB on, in pages of that size where it can be.

A system may keep large pages of shared memory to itself (``shmem_enabled`` is ``never`` on most); asked for at once and
by name, for memory that is there (``MADV_COLLAPSE``, Linux 6.1), it gives them all the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

import numpy as np
from numpy.typing import NDArray

from bf16kit.runtime.ownmemory import LARGE_PAGE
from bf16kit.runtime.weightstore import Fill
from bf16kit.sealedmemory import create, no_room, reserve, seal

_MAP_FIXED = 0x10
_MADV_COLLAPSE = 25


def filled(size: int, fill: Fill) -> int:
    """The descriptor of new sealed memory of ``size`` bytes that ``fill`` wrote.

    Raises as :func:`bf16kit.sealedmemory.create` does, and what ``fill`` raises.
    """
    descriptor = create(size)
    try:
        mapping, memory = _mapped(descriptor, size, mmap.PROT_READ | mmap.PROT_WRITE)
        _enlarge(descriptor, memory)
        reserve(descriptor, size)
        fill(memory)
        del memory
        mapping.close()  # BufferError where somebody kept a view
        seal(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def mapped(descriptor: int, size: int) -> tuple[mmap.mmap, NDArray[np.uint8]]:
    """The ``size`` bytes of sealed memory, read-only, and the mapping that lives as long as they or a view of them."""
    return _mapped(descriptor, size, mmap.PROT_READ)


def _mapped(descriptor: int, size: int, protection: int) -> tuple[mmap.mmap, NDArray[np.uint8]]:
    """Python's ``mmap`` takes no address, and only memory that begins a large page can be in large pages. So it
    reserves a little more than is needed, of which the mapping proper takes a part; both end together.

    Raises :class:`MemoryError` where there is no room in the address space.
    """
    try:
        reserved = mmap.mmap(-1, size + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=protection)
    except OSError as error:
        raise no_room(size, error) from error
    whole = np.frombuffer(reserved, np.uint8)
    start = -whole.ctypes.data % LARGE_PAGE
    address = whole.ctypes.data + start
    system = _system()
    if system.mmap(address, size, protection, mmap.MAP_SHARED | _MAP_FIXED, descriptor, 0) != address:
        code = ctypes.get_errno()
        raise no_room(size, OSError(code, os.strerror(code)))
    return reserved, whole[start : start + size]


def _enlarge(descriptor: int, memory: NDArray[np.uint8]) -> None:
    """Have ``memory`` lie in large pages, all of it but the last part of one; pages stay small where that cannot be.

    The system makes a large page of those small ones that are there, and of zeros. One of each is enough, and six
    times as fast as if all were there, or more.
    """
    large = memory.nbytes // LARGE_PAGE * LARGE_PAGE
    if not large:
        return
    with contextlib.suppress(OSError):  # no room: whoever reserves it says so
        for start in range(0, large, LARGE_PAGE):
            os.pwrite(descriptor, b"\0", start)
        _system().madvise(memory.ctypes.data, large, _MADV_COLLAPSE)


def _system() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_ssize_t]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library
