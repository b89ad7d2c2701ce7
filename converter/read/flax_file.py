"""Reads Flax's own files, msgpack as ``flax.serialization.to_bytes`` writes it, without flax and the msgpack library.

The file is a map of maps whose leaves are arrays. Extension 1, or 3 for a numpy scalar, holds the msgpack of ``[shape,
dtype's name, bytes in C order]``; extension 2 is a complex number. Arrays of more than 2**30 bytes are split into a map
with the key ``__msgpack_chunked_array__``. The msgpack library would copy every array twice. Here each is a view of the
mapped file until its bytes are copied to aligned memory.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bf16kit.messages.errors import SourceError
from bf16kit.messages.wording import quoted
from bf16kit.numerics.tensors import BY_NAME
from converter.read.arrayfile import ArraySpec, array_file
from converter.source import Array

_DEEPEST = 64
_MOST_RANK = 32
_LARGEST = 2**47  # elements of one array: more than any machine can map
_MOST_VALUES = 1 << 18  # maps, keys and arrays in one file: an array counts twice
_LONGEST_NAME, _LONGEST_NAMES = 4096, 64 << 20  # characters of one name, and of all names together
_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3
_CHUNKED = "__msgpack_chunked_array__"
_NUMBERS = {
    0xCA: ">f",
    0xCB: ">d",
    0xCC: ">B",
    0xCD: ">H",
    0xCE: ">I",
    0xCF: ">Q",
    0xD0: ">b",
    0xD1: ">h",
    0xD2: ">i",
    0xD3: ">q",
}
_FIXED_EXTENSIONS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}


@dataclass(frozen=True, slots=True)
class _Leaf:
    """An array: its dtype and shape, and its bytes in the file, in one piece or several."""

    spec: ArraySpec
    pieces: tuple[memoryview, ...]


class _Damaged(Exception):
    """The message says what is wrong, and where in the file."""


def may_be_flax(head: bytes) -> bool:
    """Return whether a file that begins with ``head`` may be Flax's: a nonempty map whose first key is text."""
    if not head:
        return False
    skip = {0xDE: 3, 0xDF: 5}.get(head[0], 1 if 0x81 <= head[0] <= 0x8F else None)
    if skip is None or len(head) <= skip:
        return False
    return 0xA1 <= head[skip] <= 0xBF or head[skip] in (0xD9, 0xDA, 0xDB)


def read_file(
    path: Path, is_wanted: Callable[[str], bool], directory: Path
) -> tuple[dict[str, Array], tuple[str, ...]]:
    """Return the arrays of ``path`` that ``is_wanted``, by their keys joined with dots, and the names of the others.

    The arrays are in the file's order, in a temporary file in ``directory``.

    Numbers become arrays without dimensions, as in Orbax; strings and None are left out. Raises :class:`SourceError`
    for a file that is damaged or truncated, or whose sizes do not match its bytes.
    """
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise SourceError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        leaves = _leaves(memoryview(mapped))
    except _Damaged as damaged:
        raise SourceError(f"{path}: truncated or damaged: not a Flax checkpoint ({damaged})") from None
    chosen = {name: leaf for name, leaf in leaves.items() if is_wanted(name)}
    with array_file({name: leaf.spec for name, leaf in chosen.items()}, directory, path) as destination:
        for name, leaf in chosen.items():
            flat, start = destination.arrays[name].reshape(-1).view(np.uint8), 0
            for piece in filter(None, leaf.pieces):
                flat[start : start + len(piece)] = np.frombuffer(piece, np.uint8)
                start += len(piece)
        return dict(destination.arrays), tuple(sorted(leaves.keys() - chosen.keys()))


def _leaves(data: memoryview) -> dict[str, _Leaf]:
    reader = _Reader(data)
    tree = reader.value(0)
    if reader.position != len(data):
        raise _Damaged(f"{len(data) - reader.position} bytes after its end")
    if not isinstance(tree, dict):
        raise _Damaged("its outermost value is not a map")
    found: dict[str, _Leaf] = {}
    characters = 0
    for name, leaf in _walk("", tree):
        if name in found:
            raise _Damaged(f"two arrays are called {quoted(name)}")
        characters += len(name)  # every name includes the keys above it
        if characters > _LONGEST_NAMES:
            raise _Damaged(f"the names of its arrays have more than {_LONGEST_NAMES} characters together")
        found[name] = leaf
    return found


def _walk(prefix: str, value: Any) -> Iterator[tuple[str, _Leaf]]:
    if len(prefix) > _LONGEST_NAME:
        raise _Damaged(f"the name {quoted(prefix)} has {len(prefix)} characters; the limit is {_LONGEST_NAME}")
    if isinstance(value, list):
        value = {str(index): item for index, item in enumerate(value)}
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _walk(f"{prefix}.{key}" if prefix else key, item)
        return
    leaf = value if isinstance(value, _Leaf) else _number(value)
    if leaf is not None:
        yield prefix, leaf


def _number(value: Any) -> _Leaf | None:
    """Return a Python number as an array without dimensions."""
    if isinstance(value, bool):
        return _Leaf(ArraySpec("bool", ()), (memoryview(bytes([value])),))
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return _Leaf(ArraySpec("int64", ()), (memoryview(struct.pack("<q", value)),))
    if isinstance(value, float):
        return _Leaf(ArraySpec("float64", ()), (memoryview(struct.pack("<d", value)),))
    return None


class _Reader:
    """Parses msgpack from a position.

    Every length is checked against the rest of the data before memory is allocated.
    """

    def __init__(self, data: memoryview, most: int = _MOST_VALUES) -> None:
        self._data = data
        self._most = self._left = most
        self.position = 0

    def value(self, depth: int) -> Any:
        """Parse the next value: a map, list, text, number, None, bytes or :class:`_Leaf`."""
        if depth > _DEEPEST:
            raise _Damaged(f"maps nested deeper than {_DEEPEST}, at byte {self.position}")
        self._left -= 1
        if self._left < 0:  # an empty map takes one byte in the file, and 64 in memory
            raise _Damaged(f"more than {self._most} values before byte {self.position}")
        tag = self._unsigned(1)
        if tag <= 0x7F or tag >= 0xE0:
            return tag if tag <= 0x7F else tag - 256
        if tag in _NUMBERS:
            return struct.unpack(_NUMBERS[tag], self._read_bytes(struct.calcsize(_NUMBERS[tag])))[0]
        if tag in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[tag]
        return self._sized(tag, depth)

    def _sized(self, tag: int, depth: int) -> Any:
        """Parse a value that states its length."""
        if 0x80 <= tag <= 0x8F or tag in (0xDE, 0xDF):
            return self._map(tag & 0x0F if tag <= 0x8F else self._unsigned(2 if tag == 0xDE else 4), depth)
        if 0x90 <= tag <= 0x9F or tag in (0xDC, 0xDD):
            count = self._count(tag & 0x0F if tag <= 0x9F else self._unsigned(2 if tag == 0xDC else 4), 1)
            return [self.value(depth + 1) for _ in range(count)]
        if 0xA0 <= tag <= 0xBF or tag in (0xD9, 0xDA, 0xDB):
            return self._text(tag & 0x1F if tag <= 0xBF else self._unsigned({0xD9: 1, 0xDA: 2, 0xDB: 4}[tag]))
        if tag in (0xC4, 0xC5, 0xC6):
            return self._read_bytes(self._unsigned({0xC4: 1, 0xC5: 2, 0xC6: 4}[tag]))
        if tag in _FIXED_EXTENSIONS or tag in (0xC7, 0xC8, 0xC9):
            size = _FIXED_EXTENSIONS.get(tag) or self._unsigned({0xC7: 1, 0xC8: 2, 0xC9: 4}[tag])
            return self._extension(self._unsigned(1), size)
        raise _Damaged(f"byte {tag:#04x} at {self.position - 1} does not begin a value")

    def _map(self, count: int, depth: int) -> Any:
        found: dict[str, Any] = {}
        for _ in range(self._count(count, 2)):
            key = self.value(depth + 1)
            if not isinstance(key, str):
                raise _Damaged(f"a key before byte {self.position} is not text")
            if key in found:
                raise _Damaged(f"the key {quoted(key)} occurs twice")
            found[key] = self.value(depth + 1)
        return _join_chunks(found) if _CHUNKED in found else found

    def _extension(self, kind: int, size: int) -> Any:
        end = self.position + size
        data = self._read_bytes(size)
        if kind == _COMPLEX:
            return None
        if kind not in (_ARRAY, _SCALAR):
            raise _Damaged(f"extension {kind} before byte {end} is not one of Flax's")
        inner = _Reader(data, most=_MOST_RANK + 4)  # the list, its shape and sizes, dtype and bytes
        fields = inner.value(_DEEPEST - 2)
        if inner.position != len(data) or not isinstance(fields, list) or len(fields) != 3:
            raise _Damaged(f"the array before byte {end} is not [shape, dtype, bytes]")
        return _leaf(fields, end)

    def _count(self, count: int, least: int) -> int:
        """Return ``count`` if that many values of at least ``least`` bytes each fit the rest of the data."""
        if count * least > len(self._data) - self.position:
            raise _Damaged(
                f"{count} values at byte {self.position}, where {len(self._data) - self.position} bytes are left"
            )
        return count

    def _text(self, size: int) -> str:
        try:
            return str(self._read_bytes(size), "utf-8")
        except UnicodeDecodeError:
            raise _Damaged(f"the text before byte {self.position} is not UTF-8") from None

    def _unsigned(self, size: int) -> int:
        return int.from_bytes(self._read_bytes(size), "big")

    def _read_bytes(self, size: int) -> memoryview:
        left = len(self._data) - self.position
        if size > left:
            raise _Damaged(f"{size} bytes are needed at byte {self.position}, and {left} are left")
        self.position += size
        return self._data[self.position - size : self.position]


def _leaf(fields: list[Any], end: int) -> _Leaf:
    shape, dtype, data = fields
    dtype = str(dtype, "ascii", "replace") if isinstance(dtype, memoryview) else dtype
    if not isinstance(dtype, str) or dtype not in BY_NAME or dtype == "string":
        known = ", ".join(name for name in BY_NAME if name != "string")
        raise _Damaged(f"the array before byte {end} has the unknown dtype {quoted(str(dtype))}; known: {known}")
    if not isinstance(shape, list) or not _are_sizes(shape) or not isinstance(data, memoryview):
        raise _Damaged(f"the array before byte {end} is not [shape, dtype, bytes]")
    spec = ArraySpec(dtype, tuple(shape))
    if spec.nbytes != len(data):
        raise _Damaged(f"the array before byte {end} is {dtype}{shape}, and has {len(data)} bytes")
    return _Leaf(spec, (data,))


def _join_chunks(parts: Mapping[str, Any]) -> _Leaf:
    """Join an array that was split: ``shape`` and ``chunks`` are maps with the keys ``0``, ``1``, …"""
    shape, chunks = _in_order(parts.get("shape")), _in_order(parts.get("chunks"))
    if not chunks or not _are_sizes(shape) or not all(isinstance(chunk, _Leaf) for chunk in chunks):
        raise _Damaged("a parted array has no shape or no chunks")
    spec = ArraySpec(chunks[0].spec.dtype, tuple(shape))
    if any(chunk.spec.dtype != spec.dtype for chunk in chunks):
        raise _Damaged("a parted array has chunks of several dtypes")
    chunk_bytes = sum(chunk.spec.nbytes for chunk in chunks)
    if chunk_bytes != spec.nbytes:
        raise _Damaged(f"a parted array is {spec.dtype}{list(shape)}, and its chunks have {chunk_bytes} bytes")
    return _Leaf(spec, tuple(piece for chunk in chunks for piece in chunk.pieces))


def _in_order(given: Any) -> list[Any]:
    if not isinstance(given, dict) or any(str(index) not in given for index in range(len(given))):
        raise _Damaged("a parted array has no shape or no chunks")
    return [given[str(index)] for index in range(len(given))]


def _are_sizes(shape: list[Any]) -> bool:
    plain = len(shape) <= _MOST_RANK and all(type(size) is int and size >= 0 for size in shape)
    return plain and math.prod(filter(None, shape)) < _LARGEST  # numpy computes the strides of an empty array, too
