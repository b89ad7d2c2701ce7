"""Loops over every weight, compiled with the CPU kernel (``kernels/rounding/``) to run at memory bandwidth.

They compute bit for bit what numpy computes in :mod:`bf16kit.numerics.rounding` and :mod:`bf16kit.numerics.residual`,
which are used when the library was not built. Arrays are C-contiguous, native-endian, and of the same length.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

LIBRARY = Path(__file__).parents[1] / "runtime" / "_bf16kernel.so"

Words = NDArray[np.uint32]
Halves = NDArray[np.uint16]

# ``Census`` of ``rounding.cpp``. The magnitudes are written as bit patterns, and ``smallest`` starts at that of a NaN.
_CENSUS = np.dtype([*((name, "i8") for name in ("nan", "inf", "overflow", "subnormal", "flushed")), ("ends", "f4", 2)])


class Loops:
    """The functions of the library. They release the GIL, so that threads can share a tensor."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        self._round = _function(library.bf16kit_round, None, pointer, pointer, count)
        self._part = _function(library.bf16kit_part, count, pointer, pointer, pointer, pointer, count)
        self._join = _function(library.bf16kit_join, None, pointer, pointer, pointer, count)
        self._census = _function(library.bf16kit_census, None, pointer, count, pointer)

    def round(self, words: Words, out: Halves) -> None:
        """Round fp32 bit patterns to bf16: to nearest, ties to even, NaN made quiet."""
        self._round(words.ctypes.data, out.ctypes.data, words.size)

    def part(self, words: Words, stored: Halves) -> tuple[Halves, NDArray[np.int64]]:
        """Return the low halves of the residual of ``words`` stored as ``stored``, and the indices of odd elements.

        The low halves do not restore the odd elements. Their indices are ascending.
        """
        low, odd = np.empty(words.size, np.uint16), np.empty(words.size, np.int64)
        found = self._part(words.ctypes.data, stored.ctypes.data, low.ctypes.data, odd.ctypes.data, words.size)
        return low, odd[:found].copy()

    def join(self, stored: Halves, low: Halves, out: Words) -> None:
        """Write the fp32 bit patterns to ``out``; they are right for all elements but the odd ones."""
        self._join(stored.ctypes.data, low.ctypes.data, out.ctypes.data, out.size)

    def census(self, words: Words) -> tuple[Any, ...]:
        """Return the fields of :class:`bf16kit.numerics.rounding.Census` after ``count``."""
        found = np.zeros(1, _CENSUS)
        found["ends"][0, 1] = np.nan
        self._census(words.ctypes.data, words.size, found.ctypes.data)
        *counts, (largest, smallest) = found[0].item()
        return *counts, float(largest), 0.0 if np.isnan(smallest) else float(smallest)


@cache
def loops() -> Loops | None:
    """Return the compiled loops; None if the library is missing or outdated, or the machine is big-endian."""
    if sys.byteorder != "little":
        return None
    try:
        return Loops(ctypes.CDLL(str(LIBRARY)))
    except (OSError, AttributeError):
        return None


def _function(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype, function.argtypes = result, arguments
    return function
