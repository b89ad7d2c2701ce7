"""Anonymous memory for weights, in pages of 2 MiB if the system has them.

A product of a few rows takes as long as reading its weights, and reading takes a fifth to a third longer from pages of
4 KiB (docs/decisions/0039-weights-in-large-pages.md).
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
from numpy.typing import NDArray

from bf16kit.runtime.memory.sealedmemory import check_room, no_room_error

LARGE_PAGE = 2 << 20  # bytes, on x86-64 and on most of arm64
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # only on Linux


def allocate_in_large_pages(size: int) -> NDArray[np.uint8]:
    """Allocate ``size`` zero bytes that start at a large page. The rest beyond whole large pages takes small pages.

    Raises :class:`MemoryError` when there is no room in the address space, or in the container.
    """
    check_room(size)
    try:
        # Python's default is shared memory, which has large pages only if the administrator allows it.
        mapping = mmap.mmap(-1, size + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise no_room_error(size, error) from error
    buffer = np.frombuffer(mapping, np.uint8)
    start = -buffer.ctypes.data % LARGE_PAGE
    large = size // LARGE_PAGE * LARGE_PAGE
    if large and _ADVICE is not None:
        with contextlib.suppress(OSError):  # a kernel built without large pages
            mapping.madvise(_ADVICE, start, large)
    return buffer[start : start + size]
