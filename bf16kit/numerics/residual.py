"""The residual: what rounding removed, so that a bfloat16 tensor restores the fp32 one bit for bit.

For each element, from its fp32 bit pattern ``W`` and the pattern ``P`` predicted from the stored bfloat16 value::

    low = (W - P) mod 2**16                    2 bytes; without a scale exactly the low half of W
    W   = P + signed(low)  [-+ 65536]          signed(low) in -32767 .. 32768

``P`` is the stored value in fp32. If a scale was folded into the stored tensor, ``P`` is that value divided by the
scale in float64 and rounded to fp32 once. ``signed(low)`` is right unless W was a tie that rounded up, or the scale
stretched the distance to 17 bits. Those elements are *crossed*: 65536 is added or subtracted, whichever gives the other
side of P. Elements farther away still (flushed subnormals, some NaNs) are kept *verbatim*, as index and bits.

A segment has these parts: the low halves; the crossed elements, as indices or as a compressed bitmap, whichever is
smaller; the verbatim indices, then their bits; a footer. The low halves of a tensor that was widened from fp16 or bf16
are packed, because most of their bits are zero. docs/artifact-format.md says where each bit is. Encoding and decoding
stream, and need little memory beyond their result.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bf16kit.messages.errors import ArtifactDamaged
from bf16kit.numerics.rounding import BF16, Bf16Array, loops

# elements, bytes of the crossed part, verbatim elements, form of crossed, bits kept of each low half, magic
_FOOTER = struct.Struct("<QQQBB2x4s")
ALL_BITS, _MAGIC, _MAGIC_PACKED = 16, b"RES1", b"RES2"  # RES1 has whole low halves, and 0 for their number of bits
_INDICES, _BITMAP = 0, 1
_CHUNK = 1 << 18  # elements: few enough that temporaries stay in the cache
_NAN = 0x7FC00000

Piece = bytes | memoryview


def bits_needed(dtype: str) -> int:
    """Return how many bits the low half of an fp32 number needs when it was widened from ``dtype``."""
    return {"float16": 3, "bfloat16": 0}.get(dtype, ALL_BITS)


def is_half(dtype: str) -> bool:
    """Return whether ``dtype`` has 16 bits, so that its low halves need fewer bits than fp32's."""
    return bits_needed(dtype) < ALL_BITS


@dataclass(frozen=True, slots=True, eq=False)
class Scale:
    """The scale folded into a stored tensor: ``stored = round(fp32 * values)``, one value per index of ``axis``.

    ``values`` is 1-D float32, each finite and not zero; ValueError otherwise.
    """

    axis: int
    values: NDArray[np.float32]

    def __post_init__(self) -> None:
        if self.values.ndim != 1 or self.values.dtype != np.float32:
            raise ValueError(f"a scale is 1-D float32, got {self.values.dtype.name}{list(self.values.shape)}")
        if not np.all(np.isfinite(self.values) & (self.values != 0)):
            raise ValueError("a scale that is zero or not finite cannot be undone")


def encode_chunks(fp32: NDArray[np.float32], bf16: Bf16Array, scale: Scale | None = None) -> Iterator[Piece]:
    """Yield the pieces of the segment that, with ``bf16`` and ``scale``, restores ``fp32`` bit for bit."""
    encoder = Encoder(fp32.shape, scale)
    yield from encoder.rows(fp32, bf16)
    yield from encoder.finish()


class Encoder:
    """Encodes a tensor of ``shape`` as its rows arrive: all pieces of :meth:`rows`, then those of :meth:`finish`.

    ``low_bits`` is how many upper bits of a low half may be nonzero; fewer than 16 only without a scale. ValueError
    when more bits than that are set.
    """

    def __init__(self, shape: tuple[int, ...], scale: Scale | None = None, low_bits: int = ALL_BITS) -> None:
        self._shape, self._scale = shape, scale
        self._low_bits = low_bits
        self._rest = np.empty(0, np.uint16)  # low halves that do not fill a group yet
        self._count = 0
        self._crossed: list[NDArray[Any]] = []  # as they are written: in a folded weight, a tenth of all elements
        self._verbatim: list[NDArray[np.int64]] = []
        self._bits: list[NDArray[np.uint32]] = []

    def rows(self, fp32: NDArray[np.float32], bf16: Bf16Array) -> Iterator[Piece]:
        """Yield the low halves of the next rows."""
        words = np.require(fp32, requirements=["C", "A"]).reshape(-1).view(np.uint32)
        stored = np.require(bf16, requirements=["C", "A"]).reshape(-1).view(np.uint16)
        for start in range(0, words.size, _CHUNK):
            yield self._block(words[start : start + _CHUNK], stored[start : start + _CHUNK])

    def _block(self, words: NDArray[np.uint32], stored: NDArray[np.uint16]) -> Piece:
        compiled = loops()
        if self._scale is None and compiled is not None:
            low, odd = compiled.part(words, stored)
            near = _near(_predicted(stored[odd]), low[odd])
        else:
            predicted = _predicted(stored, self._scale, self._count, self._shape)
            low = (words - predicted).astype(np.uint16)
            near = _near(predicted, low)
            odd = np.flatnonzero(near != words)
            near = near[odd]
        cross = _crossed(near, low[odd]) == words[odd]
        self._crossed.append((odd[cross] + self._count).astype(_index_dtype(math.prod(self._shape))))
        self._verbatim.append(odd[~cross] + self._count)
        self._bits.append(words[odd[~cross]])
        self._count += words.size
        if self._low_bits == ALL_BITS:
            return low.astype("<u2", copy=False).view(np.uint8).data
        low = np.concatenate([self._rest, low])
        full_groups = low.size // 8 * 8
        self._rest = low[full_groups:]
        return _pack_bits(low[:full_groups], self._low_bits)

    def finish(self) -> Iterator[bytes]:
        """Yield the rest of the segment."""
        yield _pack_bits(self._rest, self._low_bits)
        form, crossing = _smaller(self._crossed, self._count)
        yield crossing
        verbatim = np.concatenate([np.empty(0, np.int64), *self._verbatim])
        yield verbatim.astype("<u8").tobytes()
        yield np.concatenate([np.empty(0, np.uint32), *self._bits]).astype("<u4").tobytes()
        bits, magic = (0, _MAGIC) if self._low_bits == ALL_BITS else (self._low_bits, _MAGIC_PACKED)
        yield _FOOTER.pack(self._count, len(crossing), verbatim.size, form, bits, magic)


class Decoder:
    """Restores a tensor of ``shape`` from ``segment``, a block of rows at a time, in order.

    Raises :class:`ArtifactDamaged` when the segment is malformed or does not fit ``shape``.
    """

    def __init__(self, segment: bytes | memoryview, shape: tuple[int, ...], scale: Scale | None = None) -> None:
        self._shape, self._scale = shape, scale
        self._count, elements = 0, math.prod(shape)
        segment = memoryview(segment).cast("B")
        if len(segment) < _FOOTER.size:
            raise ArtifactDamaged(f"residual: a segment of {len(segment)} bytes is shorter than its footer")
        count, crossing, verbatim, form, bits, magic = _FOOTER.unpack(segment[-_FOOTER.size :])
        packed = magic == _MAGIC_PACKED and bits < ALL_BITS
        if not (packed or (magic == _MAGIC and bits == 0)) or form not in (_INDICES, _BITMAP):
            raise ArtifactDamaged("residual: a segment does not end in a residual footer")
        if count != elements:
            raise ArtifactDamaged(f"residual: a segment holds {count} elements, its tensor has {elements}")
        size = -(-count // 8) * bits if packed else 2 * count
        ends = np.cumsum([size, crossing, 8 * verbatim, 4 * verbatim], dtype=object)
        if ends[-1] != len(segment) - _FOOTER.size:
            raise ArtifactDamaged(f"residual: a segment of {len(segment)} bytes does not hold what its footer says")
        low = segment[:size]
        self._low = _unpack_bits(low, count, bits) if packed else np.frombuffer(low, "<u2")
        self._crossed = _crossed_indices(segment[ends[0] : ends[1]], form, count)
        self._verbatim = _indices(segment[ends[1] : ends[2]], np.dtype("<u8"), count)
        self._bits = np.frombuffer(segment[ends[2] : ends[3]], "<u4")

    def rows(self, bf16: Bf16Array, out: NDArray[np.float32]) -> None:
        """Restore the next rows, stored as ``bf16``, into ``out`` of the same shape; both C-contiguous."""
        stored, words = bf16.reshape(-1).view(np.uint16), out.reshape(-1).view(np.uint32)
        for start in range(0, stored.size, _CHUNK):
            self._block(stored[start : start + _CHUNK], words[start : start + _CHUNK])

    def _block(self, stored: NDArray[np.uint16], words: NDArray[np.uint32]) -> None:
        start, stop = self._count, self._count + stored.size
        low, compiled = self._low[start:stop], loops()
        if self._scale is None and compiled is not None and low.flags.aligned:
            compiled.join(stored, low, words)
        else:
            words[...] = _near(_predicted(stored, self._scale, start, self._shape), low)
        here = self._crossed[slice(*np.searchsorted(self._crossed, (start, stop)))] - start
        words[here] = _crossed(words[here], low[here])
        given = slice(*np.searchsorted(self._verbatim, (start, stop)))
        words[self._verbatim[given] - start] = self._bits[given]
        self._count = stop


def _predicted(
    stored: NDArray[np.uint16], scale: Scale | None = None, start: int = 0, shape: tuple[int, ...] = ()
) -> NDArray[np.uint32]:
    """Return ``P`` for the elements of a tensor of ``shape`` from ``start`` on."""
    if scale is None:
        return stored.astype(np.uint32) << np.uint32(16)
    channel = (np.arange(start, start + stored.size) // math.prod(shape[scale.axis + 1 :])) % scale.values.size
    with np.errstate(all="ignore"):  # overflow and NaN are valid predictions
        quotient = (stored.view(BF16).astype(np.float64) / scale.values.astype(np.float64)[channel]).astype(np.float32)
    bits = quotient.view(np.uint32)
    bits[np.isnan(quotient)] = _NAN  # the NaN that a division gives depends on the machine
    return bits


def _near(predicted: NDArray[np.uint32], low: NDArray[np.uint16]) -> NDArray[np.uint32]:
    """``P + signed(low)``, modulo 2**32."""
    wide = low.astype(np.uint32)
    wide[low > 0x8000] |= 0xFFFF0000
    wide += predicted
    return wide


def _crossed(near: NDArray[np.uint32], low: NDArray[np.uint16]) -> NDArray[np.uint32]:
    """Add 65536 where ``signed(low)`` is negative and subtract it elsewhere, modulo 2**32."""
    return near + np.where(low > 0x8000, np.uint32(0x10000), np.uint32(0xFFFF0000))


def _smaller(crossed: list[NDArray[Any]], count: int) -> tuple[int, bytes]:
    """Return form and bytes of the crossed elements, listed per block, in the form that takes fewer bytes."""
    listed = sum(each.nbytes for each in crossed)
    if listed > count // 64:  # a bitmap with fewer ones does not compress below the size of their indices
        flags = np.zeros(count, np.bool_)
        for each in crossed:
            flags[each] = True
        bitmap = zlib.compress(np.packbits(flags, bitorder="little").tobytes(), 6)
        if len(bitmap) < listed:
            return _BITMAP, bitmap
    return _INDICES, b"".join(each.tobytes() for each in crossed)


def _crossed_indices(crossing: memoryview, form: int, count: int) -> NDArray[np.int64]:
    if form == _INDICES:
        return _indices(crossing, _index_dtype(count), count)
    size = (count + 7) // 8
    try:
        bitmap = zlib.decompressobj().decompress(crossing, size + 1)  # bounds the output, whatever the data claims
    except zlib.error:
        raise ArtifactDamaged("residual: a bitmap cannot be decompressed") from None
    if len(bitmap) != size:
        raise ArtifactDamaged(f"residual: a bitmap of {len(bitmap)} bytes, expected {size}")
    flags = np.unpackbits(np.frombuffer(bitmap, np.uint8), count=count, bitorder="little")
    return np.flatnonzero(flags)


def _indices(data: memoryview, dtype: np.dtype[Any], count: int) -> NDArray[np.int64]:
    if len(data) % dtype.itemsize:
        raise ArtifactDamaged("residual: a list of indices is cut short")
    indices = np.frombuffer(data, dtype)
    if indices.size and (int(indices[-1]) >= count or not bool(np.all(indices[:-1] < indices[1:]))):
        raise ArtifactDamaged(f"residual: indices are not ascending below {count}")
    return indices.astype(np.int64)


def _index_dtype(count: int) -> np.dtype[Any]:
    return np.dtype("<u4" if count <= 1 << 32 else "<u8")


def _pack_bits(low: NDArray[np.uint16], count: int) -> bytes:
    """Pack the upper ``count`` bits of each low half; ValueError if another bit is set, because it would be lost."""
    if low.size and int(np.bitwise_or.reduce(low)) & ((1 << (16 - count)) - 1):
        raise ValueError(f"low halves that need more than {count} bits")
    kept = range(16 - count, 16)
    planes = [np.packbits((low >> np.uint16(bit)).astype(np.uint8) & 1, bitorder="little") for bit in kept]
    return np.stack(planes, axis=1).tobytes() if planes else b""


def _unpack_bits(data: memoryview, elements: int, count: int) -> NDArray[np.uint16]:
    low = np.zeros(elements, np.uint16)
    planes = np.frombuffer(data, np.uint8).reshape(-1, max(count, 1))
    for index, bit in enumerate(range(16 - count, 16)):
        plane = np.unpackbits(planes[:, index], count=elements, bitorder="little")
        low |= plane.astype(np.uint16) << np.uint16(bit)
    return low
