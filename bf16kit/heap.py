"""The C library's free memory, which it keeps for later unless it is told to give it back."""

from __future__ import annotations

import ctypes
from collections.abc import Callable


def trimmer() -> Callable[[], object] | None:
    """What has the C library return its free pages to the system; None where it has no such function (musl, macOS)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return None if trim is None else lambda: trim(0)


def give_back() -> None:
    """Return the free pages now. It takes a millisecond or two, and whoever allocates next takes pages anew."""
    trim = trimmer()
    if trim is not None:
        trim()
