"""The low halves of a residual where most of their bits are zero: of what was fp16 three bits, of what was bf16 none.

A widened number has zeros at its end: fp16 has 10 bits of significand, so of fp32's 23 the last 13 are zero. Only the
upper ``count`` bits of each low half are kept, eight elements together: a byte for each bit, from the lowest kept one,
in which the first element is the lowest bit. A last group of fewer than eight elements is filled with zeros.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GROUP = 8
_BITS = {"float32": 16, "float16": 3, "bfloat16": 0}


def needed(dtype: str) -> int:
    """How many bits the low half of an fp32 number needs when it was widened from ``dtype``."""
    return _BITS.get(dtype, 16)


def is_half(dtype: str) -> bool:
    """Whether ``dtype`` has 16 bits, so that widened it is restored from fewer low bits than fp32 has."""
    return needed(dtype) < _BITS["float32"]


def packed_size(elements: int, count: int) -> int:
    """The bytes that ``count`` bits of each of ``elements`` take."""
    return (elements + _GROUP - 1) // _GROUP * count


def pack(low: NDArray[np.uint16], count: int) -> bytes:
    """The upper ``count`` bits of each low half; ValueError when another bit is set, which would be lost."""
    if low.size and int(np.bitwise_or.reduce(low)) & ((1 << (16 - count)) - 1):
        raise ValueError(f"low halves that need more than {count} bits")
    filled = np.zeros((low.size + _GROUP - 1) // _GROUP * _GROUP, np.uint16)
    filled[: low.size] = low
    planes = [np.packbits((filled >> np.uint16(bit)).astype(np.uint8) & 1, bitorder="little") for bit in _kept(count)]
    return np.stack(planes, axis=1).tobytes() if planes else b""


def unpack(data: memoryview, elements: int, count: int) -> NDArray[np.uint16]:
    """The low halves of ``elements`` from :func:`packed_size` bytes."""
    low = np.zeros(elements, np.uint16)
    planes = np.frombuffer(data, np.uint8).reshape(-1, max(count, 1))
    for index, bit in enumerate(_kept(count)):
        plane = np.unpackbits(planes[:, index], count=elements, bitorder="little")
        low |= plane.astype(np.uint16) << np.uint16(bit)
    return low


def _kept(count: int) -> range:
    return range(16 - count, 16)
