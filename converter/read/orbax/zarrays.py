"""Checks the metadata of a zarr array before tensorstore opens it or memory is allocated for it.

Used by :mod:`converter.read.orbax.child`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LARGEST = 2**47  # elements of one array: more than any machine can map
_MOST_RANK = 32
_OVERHANG, _SMALL = 2, 64 << 20  # a chunk has at most twice its array's bytes (it may overhang), or this many
_MOST_TEXT = 1 << 20  # bytes of an array's metadata
_ITEMSIZES = {
    "bool": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
}  # fmt: skip
_KINDS = {"b1": "bool", "f2": "float16", "f4": "float32", "f8": "float64"}
_KINDS |= {
    f"{kind}{size}": f"{name}{8 * size}" for kind, name in (("i", "int"), ("u", "uint")) for size in (1, 2, 4, 8)
}
_COMPRESSORS = frozenset({"zstd", "gzip", "zlib", "blosc", "bz2"})
_CODECS = frozenset({"bytes", "transpose", "crc32c", "zstd", "gzip", "blosc", "sharding_indexed"})


class RejectedArray(Exception):
    """An array that is rejected; the message says what is wrong with it, without its name."""


@dataclass(frozen=True)
class ArrayMetadata:
    """One array: numpy's name for its dtype, its shape, its chunks' shape, and tensorstore's driver."""

    driver: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _ITEMSIZES[self.dtype]

    @property
    def chunk_bytes(self) -> int:
        return math.prod(self.chunks) * _ITEMSIZES[self.dtype]

    @property
    def count(self) -> int:
        """The number of chunks, each a value of the store; the last along an axis may overhang."""
        return math.prod(-(-size // chunk) for size, chunk in zip(self.shape, self.chunks, strict=True))


def zarr2(text: bytes) -> ArrayMetadata:
    """Parse a ``.zarray``. Raises :class:`RejectedArray`."""
    fields = _fields(text)
    compressor = fields.get("compressor")
    if compressor is not None and _name(compressor, "id") not in _COMPRESSORS:
        raise RejectedArray(f"has the unknown compressor {_shown(compressor)}")
    if fields.get("filters"):
        raise RejectedArray(f"has filters, {_shown(fields['filters'])}, which no Orbax checkpoint has")
    dtype = fields.get("dtype")
    return _array_metadata("zarr", _zarr2_dtype(dtype), fields.get("shape"), fields.get("chunks"), dtype)


def zarr3(text: bytes) -> ArrayMetadata:
    """Parse a ``zarr.json``. Raises :class:`RejectedArray`."""
    fields = _fields(text)
    if fields.get("node_type") != "array":
        raise RejectedArray(f"is {_shown(fields.get('node_type'))}, not an array")
    if fields.get("storage_transformers"):
        raise RejectedArray("has storage transformers, which no Orbax checkpoint has")
    grid = fields.get("chunk_grid")
    if not isinstance(grid, dict) or grid.get("name") != "regular" or not isinstance(grid.get("configuration"), dict):
        raise RejectedArray(f"has the unknown chunk grid {_shown(grid)}")
    _check_codecs(fields.get("codecs"))
    dtype = fields.get("data_type")
    known = dtype if isinstance(dtype, str) and dtype in _ITEMSIZES else None
    return _array_metadata("zarr3", known, fields.get("shape"), grid["configuration"].get("chunk_shape"), dtype)


READERS: dict[str, Callable[[bytes], ArrayMetadata]] = {".zarray": zarr2, "zarr.json": zarr3}


def _fields(text: bytes) -> dict[str, Any]:
    if len(text) > _MOST_TEXT:
        raise RejectedArray(f"has {len(text)} bytes of metadata; the limit is {_MOST_TEXT}")
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        raise RejectedArray("has metadata that is not JSON") from None
    if not isinstance(fields, dict):
        raise RejectedArray("has metadata that is not a JSON object")
    return fields


def _check_codecs(codecs: Any, depth: int = 0) -> None:
    if not isinstance(codecs, list) or len(codecs) > 8 or depth > 2:
        raise RejectedArray(f"has no readable list of codecs: {_shown(codecs)}")
    for codec in codecs:
        name = _name(codec, "name")
        if name not in _CODECS:
            raise RejectedArray(f"has the unknown codec {_shown(codec)}")
        if name == "sharding_indexed":
            inner = codec.get("configuration")
            if not isinstance(inner, dict):
                raise RejectedArray(f"has shards without a configuration: {_shown(codec)}")
            _check_codecs(inner.get("codecs"), depth + 1)
            _check_codecs(inner.get("index_codecs"), depth + 1)
            _sizes(inner.get("chunk_shape"), "parts of shards", least=1)


def _array_metadata(driver: str, dtype: str | None, shape: Any, chunks: Any, declared: Any) -> ArrayMetadata:
    if dtype is None:
        raise RejectedArray(
            f"has the dtype {_shown(declared)}, which bf16kit does not know; known: {', '.join(_ITEMSIZES)}"
        )
    sizes, pieces = _sizes(shape, "shape", least=0), _sizes(chunks, "chunks", least=1)
    if len(sizes) != len(pieces):
        raise RejectedArray(f"has shape {list(sizes)} in chunks of {list(pieces)}")
    found = ArrayMetadata(driver, dtype, sizes, pieces)
    if found.chunk_bytes > max(_OVERHANG * found.nbytes, _SMALL):
        raise RejectedArray(
            f"has chunks of {list(pieces)}, {found.chunk_bytes} bytes each, and shape {list(sizes)}, {found.nbytes}"
            f" bytes; a chunk is at most {_OVERHANG} times its array, or {_SMALL} bytes"
        )
    return found


def _sizes(given: Any, what: str, *, least: int) -> tuple[int, ...]:
    if not isinstance(given, list) or len(given) > _MOST_RANK:
        raise RejectedArray(f"has {what} {_shown(given)}, expected a list of at most {_MOST_RANK} sizes")
    if not all(type(size) is int and least <= size <= LARGEST for size in given):
        raise RejectedArray(f"has {what} {_shown(given)}, in which not all values are sizes")
    if math.prod(filter(None, given)) > LARGEST:  # also without elements, because numpy computes strides
        raise RejectedArray(f"has {what} {_shown(given)}, which does not fit in any memory")
    return tuple(given)


def _zarr2_dtype(declared: Any) -> str | None:
    """Return numpy's name for a dtype such as ``<f4``; tensorstore writes ``bfloat16`` by name, little-endian."""
    if declared == "bfloat16":
        return "bfloat16"
    if not isinstance(declared, str) or declared[:1] not in ("<", "|"):
        return None
    return _KINDS.get(declared[1:])


def _name(given: Any, key: str) -> Any:
    return given.get(key) if isinstance(given, dict) and isinstance(given.get(key), str) else None


def _shown(given: Any) -> str:
    text = repr(given)
    return text if len(text) <= 80 else f"{text[:79]}…"
