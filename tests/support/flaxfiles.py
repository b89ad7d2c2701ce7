"""Writes Flax's msgpack files without flax: the few types that ``flax.serialization.to_bytes`` uses."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def packed(value: Any) -> bytes:
    """Return ``value``, a tree of mappings, sequences, arrays, numbers, texts and None, as Flax packs it."""
    if isinstance(value, np.ndarray):
        return extension(1, array(value))
    if isinstance(value, Mapping):
        return _head(len(value), 0x80, 16, 0xDE) + b"".join(packed(key) + packed(item) for key, item in value.items())
    if isinstance(value, str):
        data = value.encode()
        return (bytes([0xA0 + len(data)]) if len(data) < 32 else b"\xda" + struct.pack(">H", len(data))) + data
    if isinstance(value, bytes):
        return b"\xc6" + struct.pack(">I", len(value)) + value
    if isinstance(value, Sequence):
        return _head(len(value), 0x90, 16, 0xDC) + b"".join(map(packed, value))
    return _plain(value)


def array(value: NDArray[Any]) -> bytes:
    """Return the content of an array's extension: its shape, the name of its dtype, its bytes."""
    return packed([list(value.shape), value.dtype.name, value.tobytes()])


def extension(kind: int, data: bytes) -> bytes:
    """Return an extension of type ``kind`` in the format for any length."""
    return b"\xc9" + struct.pack(">IB", len(data), kind) + data


def chunked(value: NDArray[Any], count: int) -> dict[str, Any]:
    """Return an array in ``count`` chunks, as Flax splits arrays of more than 2**30 bytes."""
    parts = np.array_split(value.reshape(-1), count)
    return {
        "__msgpack_chunked_array__": True,
        "shape": {str(axis): size for axis, size in enumerate(value.shape)},
        "chunks": {str(index): part for index, part in enumerate(parts)},
    }


def _head(count: int, fixed: int, most: int, long: int) -> bytes:
    return bytes([fixed + count]) if count < most else bytes([long]) + struct.pack(">H", count)


def _plain(value: Any) -> bytes:
    if value is None:
        return b"\xc0"
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value)
    if 0 <= value < 128:
        return bytes([value])
    return b"\xcf" + struct.pack(">Q", value) if value >= 2**63 else b"\xd3" + struct.pack(">q", value)
