"""Splits a segment of the residual into its parts (described in :mod:`bf16kit.numerics.residual`) and checks them.

The low halves of a tensor that was widened are packed, because most of their bits are zero: fp16 has 10 bits of
significand, so the last 13 of fp32's 23 are zero and 3 bits remain; of bf16 none. Only the upper ``count`` bits of each
low half are kept. Eight elements are packed together, into one byte per bit, from the lowest kept bit up; the first
element is the byte's lowest bit. A last group of fewer than eight elements is filled with zeros.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bf16kit.messages.errors import ArtifactDamaged

# elements, bytes of the crossed part, verbatim elements, form of crossed, bits kept of each low half, magic
FOOTER = struct.Struct("<QQQBB2x4s")
ALL_BITS, MAGIC, MAGIC_PACKED = 16, b"RES1", b"RES2"  # RES1 has whole low halves, and 0 for their number of bits
INDICES, BITMAP = 0, 1
_GROUP = 8
_BITS = {"float32": 16, "float16": 3, "bfloat16": 0}


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """The parts of a segment; ``read`` raises ArtifactDamaged if they do not fit together."""

    low: NDArray[np.uint16]
    form: int
    crossing: memoryview
    verbatim: NDArray[np.uint64]
    bits: NDArray[np.uint32]

    @classmethod
    def read(cls, segment: memoryview, count: int) -> Parts:
        if len(segment) < FOOTER.size:
            raise ArtifactDamaged(f"residual: a segment of {len(segment)} bytes is shorter than its footer")
        elements, crossing, verbatim, form, bits, magic = FOOTER.unpack(segment[-FOOTER.size :])
        packed = magic == MAGIC_PACKED and bits < ALL_BITS
        if not (packed or (magic == MAGIC and bits == 0)) or form not in (INDICES, BITMAP):
            raise ArtifactDamaged("residual: a segment does not end in a residual footer")
        if elements != count:
            raise ArtifactDamaged(f"residual: a segment holds {elements} elements, its tensor has {count}")
        size = packed_size(elements, bits) if packed else 2 * elements
        ends = np.cumsum([size, crossing, 8 * verbatim, 4 * verbatim], dtype=object)
        if ends[-1] != len(segment) - FOOTER.size:
            raise ArtifactDamaged(f"residual: a segment of {len(segment)} bytes does not hold what its footer says")
        parts = cls(
            low=unpack_bits(segment[:size], count, bits) if packed else np.frombuffer(segment[:size], "<u2"),
            form=form,
            crossing=segment[ends[0] : ends[1]],
            verbatim=np.frombuffer(segment[ends[1] : ends[2]], "<u8"),
            bits=np.frombuffer(segment[ends[2] : ends[3]], "<u4"),
        )
        _check_indices(parts.verbatim, count)
        return parts

    def crossed(self) -> NDArray[np.int64]:
        """Sorted flat indices of the crossed elements."""
        count = self.low.size
        if self.form == INDICES:
            dtype = index_dtype(count)
            if len(self.crossing) % dtype.itemsize:
                raise ArtifactDamaged("residual: a list of indices is cut short")
            indices = np.frombuffer(self.crossing, dtype)
            _check_indices(indices, count)
            return indices.astype(np.int64)
        return np.flatnonzero(np.unpackbits(_inflate(self.crossing, count), count=count, bitorder="little"))


def _inflate(compressed: memoryview, count: int) -> NDArray[np.uint8]:
    size = (count + 7) // 8
    try:
        bitmap = zlib.decompressobj().decompress(compressed, size + 1)  # bounds the output, whatever the data claims
    except zlib.error:
        raise ArtifactDamaged("residual: a bitmap cannot be decompressed") from None
    if len(bitmap) != size:
        raise ArtifactDamaged(f"residual: a bitmap of {len(bitmap)} bytes, expected {size}")
    return np.frombuffer(bitmap, np.uint8)


def _check_indices(indices: NDArray[Any], count: int) -> None:
    if indices.size and (int(indices[-1]) >= count or not bool(np.all(indices[:-1] < indices[1:]))):
        raise ArtifactDamaged(f"residual: indices are not ascending below {count}")


def index_dtype(count: int) -> np.dtype[Any]:
    """Return the dtype of indices into ``count`` elements."""
    return np.dtype("<u4" if count <= 1 << 32 else "<u8")


def bits_needed(dtype: str) -> int:
    """Return how many bits the low half of an fp32 number needs when it was widened from ``dtype``."""
    return _BITS.get(dtype, 16)


def is_half(dtype: str) -> bool:
    """Return whether ``dtype`` has 16 bits, so that its low halves need fewer bits than fp32's."""
    return bits_needed(dtype) < _BITS["float32"]


def packed_size(elements: int, count: int) -> int:
    """Return the size in bytes of ``count`` bits of each of ``elements``."""
    return (elements + _GROUP - 1) // _GROUP * count


def pack_bits(low: NDArray[np.uint16], count: int) -> bytes:
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


def unpack_bits(data: memoryview, elements: int, count: int) -> NDArray[np.uint16]:
    """Return the low halves of ``elements`` from :func:`packed_size` bytes."""
    low = np.zeros(elements, np.uint16)
    planes = np.frombuffer(data, np.uint8).reshape(-1, max(count, 1))
    for index, bit in enumerate(_kept_bit_positions(count)):
        plane = np.unpackbits(planes[:, index], count=elements, bitorder="little")
        low |= plane.astype(np.uint16) << np.uint16(bit)
    return low


def _kept_bit_positions(count: int) -> range:
    return range(16 - count, 16)
