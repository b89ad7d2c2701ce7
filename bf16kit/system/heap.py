"""Returning the C library's free memory to the system; it keeps that memory for later unless told otherwise."""

from __future__ import annotations

import ctypes
from collections.abc import Callable


def find_malloc_trim() -> Callable[[], object] | None:
    """Return a function that has the C library return its free pages; None if it has no such function (musl, macOS)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return None if trim is None else lambda: trim(0)


def release_free_memory() -> None:
    """Return the free pages now, which takes a millisecond or two.

    Later allocations must get pages from the system again.
    """
    trim = find_malloc_trim()
    if trim is not None:
        trim()
