"""Rounding fp32 to bfloat16 and back, and a census of what a tensor would lose.

bfloat16 is fp32 cut after 16 bits: 1 sign bit, 8 exponent bits, 7 stored fraction bits. Rounding is to nearest, ties to
even; a magnitude of at least fp32 ``0x7F7F8000`` (3.396e38) becomes infinite; NaN stays NaN and keeps its sign. The
rounding is compiled with the CPU kernel, or that of ml_dtypes. Both agree with ONNX Runtime's Cast bit for bit.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Bf16Array = NDArray[Any]  # numpy's typing has no name for ml_dtypes.bfloat16
Words = NDArray[np.uint32]
Halves = NDArray[np.uint16]
Subnormals = Literal["keep", "flush"]

BF16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
LARGEST = 3.3895313892515355e38  # 0x7F7F
LOWEST = -LARGEST
SMALLEST_NORMAL = 2.0**-126
UNIT_ROUNDOFF = 2.0**-8
OVERFLOW = 3.39617752923046e38  # fp32 0x7F7F8000: from here on, rounding gives infinity

LIBRARY = Path(__file__).parents[1] / "runtime" / "_bf16kernel.so"
_CHUNK = 1 << 18  # elements: temporaries fit the cache and are small beside any checkpoint
# ``Census`` of ``rounding.cpp``. The magnitudes are written as bit patterns, and ``smallest`` starts at that of a NaN.
_CENSUS = np.dtype([*((name, "i8") for name in ("nan", "inf", "overflow", "subnormal", "flushed")), ("ends", "f4", 2)])


def to_bf16(
    x: NDArray[np.float32], *, subnormals: Subnormals = "keep", saturate: bool = False, out: Bf16Array | None = None
) -> Bf16Array:
    """Round ``x`` to bfloat16: C-contiguous, same shape; needs little memory beyond the result.

    The result is written to ``out`` when given: bfloat16, C-contiguous, of the shape of ``x``, else ValueError.
    TypeError if ``x`` is not float32.

    ``subnormals="flush"`` turns subnormal *results* into zeros of the same sign, as Cloud TPUs do. ``saturate`` turns
    infinite results, from overflow or from an infinite ``x``, into the largest finite value of that sign.
    """
    if x.dtype != np.float32:
        raise TypeError(f"to_bf16 takes float32, got {x.dtype.name}")
    if out is None:
        out = np.empty(x.shape, BF16)
    elif out.shape != x.shape or out.dtype != BF16 or not out.flags.c_contiguous:
        raise ValueError(f"cannot round {list(x.shape)} into {out.dtype.name}{list(out.shape)}")
    compiled = loops()
    if compiled is not None and x.flags.c_contiguous and x.flags.aligned:
        compiled.round(x.reshape(-1).view(np.uint32), out.reshape(-1).view(np.uint16))
    else:
        with np.errstate(over="ignore", invalid="ignore"):  # census() counts overflows, and NaN is allowed
            out[...] = x.astype(BF16)
    if subnormals == "keep" and not saturate:
        return out
    for bits in _chunks(out.reshape(-1).view(np.uint16)):
        magnitude = bits & 0x7FFF
        if subnormals == "flush":
            bits[magnitude < 0x0080] &= 0x8000
        if saturate:
            infinite = magnitude == 0x7F80
            bits[infinite] = (bits[infinite] & 0x8000) | 0x7F7F
    return out


def to_fp32(x: Bf16Array) -> NDArray[np.float32]:
    """Widen to fp32, exactly: 16 zero bits are appended, NaN payloads included. C-contiguous."""
    if x.dtype != BF16:
        raise TypeError(f"to_fp32 takes bfloat16, got {x.dtype.name}")
    bits = np.ascontiguousarray(x).reshape(-1).view(np.uint16).astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32).reshape(x.shape)


@dataclass(frozen=True, slots=True)
class Census:
    """Range events of rounding a tensor to bfloat16, counted in elements; ``nan`` and ``inf`` are in the fp32 tensor.

    ``overflow``: finite, but infinite after rounding. ``subnormal``: subnormal after rounding. ``flushed_to_zero``: not
    zero, but zero after rounding even with subnormals kept. ``max_abs`` and ``min_abs_nonzero`` are over the finite
    fp32 values, 0 when there are none.
    """

    count: int = 0
    nan: int = 0
    inf: int = 0
    overflow: int = 0
    subnormal: int = 0
    flushed_to_zero: int = 0
    max_abs: float = 0.0
    min_abs_nonzero: float = 0.0

    def __add__(self, other: Census) -> Census:
        added = Census(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))
        smallest = min((v for v in (self.min_abs_nonzero, other.min_abs_nonzero) if v > 0), default=0.0)
        return replace(added, max_abs=max(self.max_abs, other.max_abs), min_abs_nonzero=smallest)

    @property
    def severity(self) -> tuple[float, ...]:
        """Sort key from worst to best: shares that become non-finite, zero and subnormal, then the room.

        That is in binades, to the nearer end of bf16's normal range; negative beyond an end.
        """
        lost = (self.nan + self.inf + self.overflow, self.flushed_to_zero, self.subnormal)
        above = math.log2(OVERFLOW / self.max_abs) if self.max_abs else math.inf
        below = math.log2(self.min_abs_nonzero / SMALLEST_NORMAL) if self.min_abs_nonzero else math.inf
        return (*(-elements / max(1, self.count) for elements in lost), min(above, below))


def census(x: NDArray[np.float32]) -> Census:
    """Count the range events that :func:`to_bf16` would cause in ``x`` (float32, any shape), without rounding it."""
    if x.dtype != np.float32:
        raise TypeError(f"census takes float32, got {x.dtype.name}")
    words, compiled = np.require(x, requirements=["C", "A"]).reshape(-1).view(np.uint32), loops()
    if compiled is not None:
        return Census(words.size, *compiled.census(words))
    return sum((_census(bits & 0x7FFFFFFF) for bits in _chunks(words)), Census())


def _census(magnitude: NDArray[Any]) -> Census:
    """The census of one chunk, from fp32 bit patterns without their sign: they order as the magnitudes do."""
    nonzero = magnitude[(magnitude > 0) & (magnitude < 0x7F800000)].view(np.float32)
    return Census(
        count=magnitude.size,
        nan=int(np.count_nonzero(magnitude > 0x7F800000)),
        inf=int(np.count_nonzero(magnitude == 0x7F800000)),
        overflow=int(np.count_nonzero((magnitude >= 0x7F7F8000) & (magnitude < 0x7F800000))),
        # 2**-134 (0x8000) is a tie and goes to the even zero; 0x007F8000 is a tie and goes to the smallest normal
        subnormal=int(np.count_nonzero((magnitude > 0x8000) & (magnitude < 0x007F8000))),
        flushed_to_zero=int(np.count_nonzero((magnitude > 0) & (magnitude <= 0x8000))),
        max_abs=float(nonzero.max(initial=0.0)),
        min_abs_nonzero=float(nonzero.min()) if nonzero.size else 0.0,
    )


def _chunks(flat: NDArray[Any]) -> Iterator[NDArray[Any]]:
    for start in range(0, flat.size, _CHUNK):
        yield flat[start : start + _CHUNK]


class Loops:
    """Loops over every weight, compiled with the CPU kernel (``kernels/rounding/``) to run at memory bandwidth.

    They compute bit for bit what numpy computes here and in :mod:`bf16kit.numerics.residual`, which is used when the
    library was not built. Arrays are C-contiguous, native-endian, and of the same length. The GIL is released.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        prototype, pointer, count = ctypes.CFUNCTYPE, ctypes.c_void_p, ctypes.c_int64
        self._round = prototype(None, pointer, pointer, count)(("bf16kit_round", library))
        self._part = prototype(count, pointer, pointer, pointer, pointer, count)(("bf16kit_part", library))
        self._join = prototype(None, pointer, pointer, pointer, count)(("bf16kit_join", library))
        self._census = prototype(None, pointer, count, pointer)(("bf16kit_census", library))

    def round(self, words: Words, out: Halves) -> None:
        """Round fp32 bit patterns to bf16: to nearest, ties to even, NaN made quiet."""
        self._round(words.ctypes.data, out.ctypes.data, words.size)

    def part(self, words: Words, stored: Halves) -> tuple[Halves, NDArray[np.int64]]:
        """Return the residual's low halves, and the ascending indices of the elements that they do not restore."""
        low, odd = np.empty(words.size, np.uint16), np.empty(words.size, np.int64)
        found = self._part(words.ctypes.data, stored.ctypes.data, low.ctypes.data, odd.ctypes.data, words.size)
        return low, odd[:found].copy()

    def join(self, stored: Halves, low: Halves, out: Words) -> None:
        """Write the fp32 bit patterns to ``out``; they are right for all elements but the odd ones."""
        self._join(stored.ctypes.data, low.ctypes.data, out.ctypes.data, out.size)

    def census(self, words: Words) -> tuple[Any, ...]:
        """Return the fields of :class:`Census` after ``count``."""
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
