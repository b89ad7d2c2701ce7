"""Packs the low halves of a residual when most of their bits are zero: 3 bits remain for fp16, none for bf16.

A widened number ends in zeros: fp16 has 10 bits of significand, so the last 13 of fp32's 23 are zero. Only the upper
``count`` bits of each low half are kept. Eight elements are packed together, into one byte per bit, from the lowest
kept bit up; the first element is the byte's lowest bit. A last group of fewer than eight elements is filled with zeros.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GROUP = 8
_BITS = {"float32": 16, "float16": 3, "bfloat16": 0}


def bits_needed(dtype: str) -> int:
    """Return how many bits the low half of an fp32 number needs when it was widened from ``dtype``."""
    return _BITS.get(dtype, 16)


def is_half(dtype: str) -> bool:
    """Return whether ``dtype`` has 16 bits, so that its low halves need fewer bits than fp32's."""
    return bits_needed(dtype) < _BITS["float32"]


def packed_size(elements: int, count: int) -> int:
    """Return the size in bytes of ``count`` bits of each of ``elements``."""
    return (elements + _GROUP - 1) // _GROUP * count


def pack(low: NDArray[np.uint16], count: int) -> bytes:
    """Pack the upper ``count`` bits of each low half; ValueError if another bit is set, because it would be lost."""
    if low.size and int(np.bitwise_or.reduce(low)) & ((1 << (16 - count)) - 1):
        raise ValueError(f"low halves that need more than {count} bits")
    filled = np.zeros((low.size + _GROUP - 1) // _GROUP * _GROUP, np.uint16)
    filled[: low.size] = low
    planes = [
        np.packbits((filled >> np.uint16(bit)).astype(np.uint8) & 1, bitorder="little")
        for bit in _kept_bit_positions(count)
    ]
    return np.stack(planes, axis=1).tobytes() if planes else b""


def unpack(data: memoryview, elements: int, count: int) -> NDArray[np.uint16]:
    """Return the low halves of ``elements`` from :func:`packed_size` bytes."""
    low = np.zeros(elements, np.uint16)
    planes = np.frombuffer(data, np.uint8).reshape(-1, max(count, 1))
    for index, bit in enumerate(_kept_bit_positions(count)):
        plane = np.unpackbits(planes[:, index], count=elements, bitorder="little")
        low |= plane.astype(np.uint16) << np.uint16(bit)
    return low


def _kept_bit_positions(count: int) -> range:
    return range(16 - count, 16)
