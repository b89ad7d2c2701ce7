"""Reads tables of sorted strings, LevelDB's format, in which TensorFlow writes the index of a checkpoint.

The format is that of leveldb/doc/table_format.md: blocks of prefixed keys, each followed by a checksum, an index of the
blocks, and a footer of 48 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import islice

LARGEST = 64 << 20  # bytes: enough for some hundred thousand variables
_FOOTER = 48
_MAGIC = 0xDB4775248B80FB57
_TRAILER = 5  # a block's compression type, and its checksum
_CASTAGNOLI = 0x82F63B78
_LONGEST = 4096  # bytes of a key
# Limits for all keys: the file stores common prefixes once, but here each key is complete.
_MOST_ENTRIES, _MOST_KEYS = 1 << 18, 64 << 20  # entries, bytes


class Damaged(Exception):
    """The table is not valid; the message says why."""


def entries(table: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield each key of ``table`` with its value, in order. Raises :class:`Damaged`."""
    if len(table) < _FOOTER or int.from_bytes(table[-8:], "little") != _MAGIC:
        raise Damaged("its end is not that of an index")
    _, position = _handle(table, len(table) - _FOOTER)
    index, _ = _handle(table, position)
    blocks = [_handle(value, 0)[0] for _, value in islice(_entries(_block(table, *index)), _MOST_ENTRIES + 1)]
    if len(blocks) > _MOST_ENTRIES:
        raise Damaged(f"it has more than {_MOST_ENTRIES} blocks")
    if sum(size for _, size in blocks) > len(table):  # one block listed many times
        raise Damaged("its blocks are larger than the file")
    last, count, total = None, 0, 0
    for block in blocks:
        for key, value in _entries(_block(table, *block)):
            count, total = count + 1, total + len(key)
            if count > _MOST_ENTRIES or total > _MOST_KEYS:
                raise Damaged(f"it has more than {_MOST_ENTRIES} entries, or keys of more than {_MOST_KEYS} bytes")
            if last is not None and key <= last:
                raise Damaged("its keys are not in order")
            last = key
            yield key, value


def _handle(data: bytes, position: int) -> tuple[tuple[int, int], int]:
    offset, position = varint(data, position)
    size, position = varint(data, position)
    return (offset, size), position


def _block(table: bytes, offset: int, size: int) -> bytes:
    end = offset + size
    if end + _TRAILER > len(table) - _FOOTER:
        raise Damaged("a block lies beyond its end")
    if table[end] != 0:
        raise Damaged("a block is compressed, which TensorFlow never does")
    stored = int.from_bytes(table[end + 1 : end + _TRAILER], "little")
    if _masked(_crc32c(table[offset : end + 1])) != stored:
        raise Damaged("the checksum of a block is wrong")
    return table[offset:end]


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    if len(block) < 4:
        raise Damaged("a block has no end")
    end = len(block) - 4 * (1 + int.from_bytes(block[-4:], "little"))
    if end < 0:
        raise Damaged("a block has no end")
    key, position = b"", 0
    while position < end:
        shared, position = varint(block, position)
        own, position = varint(block, position)
        size, position = varint(block, position)
        if shared + own > _LONGEST:
            raise Damaged(f"a key has {shared + own} bytes; the limit is {_LONGEST}")
        if shared > len(key) or position + own + size > end:
            raise Damaged("a key or its value lies beyond its block")
        key = key[:shared] + block[position : position + own]
        yield key, block[position + own : position + own + size]
        position += own + size


def varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the number at ``position``, encoded with 7 bits per byte, and the position after it."""
    value = 0
    for shift in range(0, 64, 7):
        if position >= len(data):
            raise Damaged("a number is cut off")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise Damaged("a number has no end")


def _masked(crc: int) -> int:
    """Mask a checksum as LevelDB does, because the checksummed data may itself contain checksums."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _crc32c(data: bytes) -> int:
    table, crc = _table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


@cache
def _table() -> tuple[int, ...]:
    found = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (_CASTAGNOLI if byte & 1 else 0)
        found.append(byte)
    return tuple(found)
