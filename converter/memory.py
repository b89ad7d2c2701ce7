"""Giving memory back to the system between the large steps of a conversion."""

from __future__ import annotations

import ctypes
import gc
import sys


def release() -> None:
    """Collect what is garbage, and have the C library return its free pages, which it otherwise keeps for later."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; musl has none
        if trim is not None:
            trim(0)
