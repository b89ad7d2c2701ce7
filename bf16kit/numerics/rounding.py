"""Rounding fp32 to bfloat16 and back, and a census of what a tensor would lose.

bfloat16 is fp32 cut after 16 bits: 1 sign bit, 8 exponent bits, 7 stored fraction bits. Rounding is to nearest, ties to
even; a magnitude of at least fp32 ``0x7F7F8000`` (3.396e38) becomes infinite; NaN stays NaN and keeps its sign. The
rounding itself is compiled with the CPU kernel (:mod:`bf16kit.numerics.native`), or else that of ml_dtypes. Both agree
with ONNX Runtime's Cast bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from bf16kit.numerics.native import NONE, CensusCounts, loops

Bf16Array = NDArray[Any]  # numpy's typing has no name for ml_dtypes.bfloat16
Subnormals = Literal["keep", "flush"]

BF16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
LARGEST = 3.3895313892515355e38  # 0x7F7F
LOWEST = -LARGEST
SMALLEST_NORMAL = 2.0**-126
UNIT_ROUNDOFF = 2.0**-8
OVERFLOW = 3.39617752923046e38  # fp32 0x7F7F8000: from here on, rounding gives infinity

_SIGN = 0x8000
_MAGNITUDE = 0x7FFF
_INF = 0x7F80
_LARGEST_BITS = 0x7F7F
_SMALLEST_NORMAL_BITS = 0x0080
_CHUNK = 1 << 18  # elements: temporaries fit the cache and are small beside any checkpoint


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
    rounded = _rounded(x, out)
    if subnormals == "keep" and not saturate:
        return rounded
    for bits in _chunks(rounded.reshape(-1).view(np.uint16)):
        magnitude = bits & _MAGNITUDE
        if subnormals == "flush":
            bits[magnitude < _SMALLEST_NORMAL_BITS] &= _SIGN
        if saturate:
            infinite = magnitude == _INF
            bits[infinite] = (bits[infinite] & _SIGN) | _LARGEST_BITS
    return rounded


def _rounded(x: NDArray[np.float32], out: Bf16Array) -> Bf16Array:
    compiled = loops()
    if compiled is not None and x.flags.c_contiguous and x.flags.aligned:
        compiled.round(x.reshape(-1).view(np.uint32), out.reshape(-1).view(np.uint16))
        return out
    with np.errstate(over="ignore", invalid="ignore"):  # census() counts overflows, and NaN is allowed
        out[...] = x.astype(BF16)
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
        smallest = [v for v in (self.min_abs_nonzero, other.min_abs_nonzero) if v > 0]
        return Census(
            count=self.count + other.count,
            nan=self.nan + other.nan,
            inf=self.inf + other.inf,
            overflow=self.overflow + other.overflow,
            subnormal=self.subnormal + other.subnormal,
            flushed_to_zero=self.flushed_to_zero + other.flushed_to_zero,
            max_abs=max(self.max_abs, other.max_abs),
            min_abs_nonzero=min(smallest, default=0.0),
        )


def census(x: NDArray[np.float32]) -> Census:
    """Count the range events that :func:`to_bf16` would cause in ``x`` (float32, any shape), without rounding it."""
    if x.dtype != np.float32:
        raise TypeError(f"census takes float32, got {x.dtype.name}")
    compiled = loops()
    words = np.require(x, requirements=["C", "A"]).reshape(-1).view(np.uint32)
    if compiled is not None:
        return _compiled_census(words.size, compiled.census(words))
    total = Census()
    for bits in _chunks(words):
        total += _census(bits & 0x7FFFFFFF)
    return total


def _compiled_census(count: int, counts: CensusCounts) -> Census:
    smallest = 0 if counts.smallest == NONE else counts.smallest
    patterns = np.array([counts.largest, smallest], np.int32).view(np.float32)
    return Census(
        count=count,
        nan=counts.nan,
        inf=counts.inf,
        overflow=counts.overflow,
        subnormal=counts.subnormal,
        flushed_to_zero=counts.flushed,
        max_abs=float(patterns[0]),
        min_abs_nonzero=float(patterns[1]),
    )


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
