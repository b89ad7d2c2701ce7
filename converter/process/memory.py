"""Giving memory back to the system: a conversion's peak should be that of its largest step, not of all of them."""

from __future__ import annotations

import ctypes
import gc
import sys

_M_MMAP_THRESHOLD = -3  # glibc's number for mallopt
_LARGE = 256 << 10  # bytes


def map_large_blocks() -> None:
    """Have the C library map blocks of 256 KiB and more one by one, for the whole process from now on.

    Otherwise glibc raises that bound to 32 MiB as it goes, and matrices that were freed stay behind as holes.
    """
    mallopt = _libc("mallopt")
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)


def release() -> None:
    """Collect what is garbage, and have the C library return its free pages, which it otherwise keeps for later."""
    gc.collect()
    trim = _libc("malloc_trim")
    if trim is not None:
        trim(0)


def _libc(name: str) -> ctypes._NamedFuncPointer | None:
    """A function of the C library; None where it has no such one (musl, macOS)."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
