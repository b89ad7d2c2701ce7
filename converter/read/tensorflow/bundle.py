"""Reads the stored variables of a SavedModel without TensorFlow, as views of the mapped files.

``variables.index`` gives each tensor's name, dtype, shape and position; ``variables.data-00000-of-00001`` and so on
hold the bytes.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from bf16kit.messages.errors import SourceError
from bf16kit.messages.wording import quoted
from converter.read.tensorflow import sstable
from converter.read.tensorflow.messages import message
from converter.read.tensorflow.variablenames import OBJECTS, full_names, named
from converter.source import Array

_STRING = 7
_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.float32),
    2: np.dtype(np.float64),
    3: np.dtype(np.int32),
    4: np.dtype(np.uint8),
    5: np.dtype(np.int16),
    6: np.dtype(np.int8),
    9: np.dtype(np.int64),
    10: np.dtype(np.bool_),
    14: np.dtype(ml_dtypes.bfloat16),
    17: np.dtype(np.uint16),
    19: np.dtype(np.float16),
    22: np.dtype(np.uint32),
    23: np.dtype(np.uint64),
}
_MOST_SHARDS = 10_000
_MOST_DIMENSIONS = 32
_MOST_ELEMENTS = 2**47  # more than any machine can map


@dataclass(frozen=True, slots=True)
class Bundle:
    """Tensors by name, in order; the files they are in; and the names of string variables, which are left out."""

    tensors: dict[str, Array]
    files: tuple[Path, ...]
    strings: tuple[str, ...]


def read(prefix: Path) -> Bundle:
    """Return the tensors of the checkpoint ``prefix`` (``…/variables/variables``); none if it has no index.

    Names are those of :mod:`.variablenames`. Raises :class:`SourceError` when a file is damaged, missing, truncated or
    outside its directory, and for tensors that no artifact can hold.
    """
    index = prefix.with_name(f"{prefix.name}.index")
    if not index.exists():
        left = sorted(prefix.parent.glob(f"{prefix.name}.data-*"))
        if left:
            raise SourceError(f"{index}: is missing, but {left[0].name} exists; copy the whole directory")
        return Bundle({}, (), ())
    if not index.is_file():  # reading a pipe may block forever
        raise SourceError(f"{index}: is not a file")
    try:
        return _read(prefix, index)
    except sstable.Damaged as error:
        raise SourceError(f"{index}: truncated or damaged: {error}") from None
    except OSError as error:
        raise SourceError(f"{index}: cannot be read: {error.strerror or error}") from None


def _read(prefix: Path, index: Path) -> Bundle:
    _check_inside(index)
    if index.stat().st_size > sstable.LARGEST:
        raise SourceError(f"{index}: is {index.stat().st_size} bytes; the limit for an index is {sstable.LARGEST}")
    found = list(_entries(index))
    shards = _shards(prefix, index, found)
    _check_overlaps(index, found, shards)
    tensors: dict[str, Array] = {}
    strings, full = [], dict[str, str]()
    for key, entry in found:
        if key and entry.dtype == _STRING:
            strings.append(key)
            if key == OBJECTS:
                full = full_names(bytes(_bytes(index, key, entry, shards)))
        elif key:
            tensors[key] = _tensor(index, key, entry, shards)
    return Bundle(named(tensors, full), (index, *(path for path, _ in shards)), tuple(strings))


def _entries(index: Path) -> Iterator[tuple[str, Any]]:
    """Yield the header, under the empty name, and each tensor's entry."""
    from google.protobuf.message import DecodeError

    for key, value in sstable.entries(index.read_bytes()):
        parsed = message("BundleEntry" if key else "BundleHeader")()
        try:
            parsed.ParseFromString(value)
            yield key.decode(), parsed
        except (DecodeError, UnicodeDecodeError):
            name = quoted(key.decode(errors="backslashreplace"))
            raise SourceError(f"{index}: truncated or damaged: the entry {name} cannot be read") from None


def _shards(prefix: Path, index: Path, found: list[tuple[str, Any]]) -> list[tuple[Path, mmap.mmap | None]]:
    """Return every data file, mapped; None for an empty one."""
    header = next((entry for key, entry in found if not key), None)
    if header is None or not 1 <= header.num_shards <= _MOST_SHARDS:
        raise SourceError(f"{index}: truncated or damaged: it does not say in how many files its data is")
    if header.endianness != 0:
        raise SourceError(f"{index}: was written on a big-endian machine; save the model again on a little-endian one")
    paths = [
        prefix.with_name(f"{prefix.name}.data-{shard:05d}-of-{header.num_shards:05d}")
        for shard in range(header.num_shards)
    ]
    return [(path, _mapped(path)) for path in paths]


def _mapped(path: Path) -> mmap.mmap | None:
    if not path.is_file():
        raise SourceError(f"{path}: is missing; copy the whole directory")
    _check_inside(path)
    with path.open("rb") as file:
        # Copy-on-write, as for safetensors: arrays are writable, but the file never changes.
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if path.stat().st_size else None


def _check_inside(path: Path) -> None:
    """Raise SourceError for a link out of the model's directory.

    Links within it, as model caches make them, are allowed.
    """
    root = path.parent.parent.resolve()
    if not path.resolve().is_relative_to(root):
        raise SourceError(f"{path}: is a link out of the model's directory; put the file itself there")


def _tensor(index: Path, name: str, entry: Any, shards: list[tuple[Path, mmap.mmap | None]]) -> Array:
    dtype, shape = _DTYPES.get(entry.dtype), tuple(dim.size for dim in entry.shape.dim)
    if dtype is None:
        raise SourceError(
            f"{index}: variable {quoted(name)} is of TensorFlow's dtype {entry.dtype}, which artifacts cannot hold"
        )
    if entry.slices:
        raise SourceError(
            f"{index}: variable {quoted(name)} is stored in slices (a partitioned variable); save the model without a"
            " partitioner"
        )
    if not _is_valid_shape(shape) or entry.shape.unknown_rank:
        raise SourceError(f"{index}: truncated or damaged: the shape of {quoted(name)} is invalid")
    if math.prod(shape) * dtype.itemsize != entry.size:
        raise SourceError(
            f"{index}: truncated or damaged: {quoted(name)} is {dtype}{list(shape)}, but claims {entry.size} bytes"
        )
    data = _bytes(index, name, entry, shards)
    return np.frombuffer(data, dtype).reshape(shape) if len(data) else np.empty(shape, dtype)


def _bytes(index: Path, name: str, entry: Any, shards: list[tuple[Path, mmap.mmap | None]]) -> memoryview:
    """Return the bytes stored under ``name``."""
    if not 0 <= entry.shard < len(shards) or min(entry.offset, entry.size) < 0:
        raise SourceError(f"{index}: truncated or damaged: the position of {quoted(name)} is invalid")
    path, data = shards[entry.shard]
    available = 0 if data is None else len(data)
    if entry.offset + entry.size > available:
        raise SourceError(f"{path}: truncated: {available} bytes, {quoted(name)} ends at {entry.offset + entry.size}")
    return memoryview(data or b"")[entry.offset : entry.offset + entry.size]


def _is_valid_shape(shape: tuple[int, ...]) -> bool:
    """Return whether numpy can count the elements of ``shape``.

    The other sizes may be too large even if one is 0.
    """
    sizes = [size for size in shape if size]
    return len(shape) <= _MOST_DIMENSIONS and min(sizes, default=1) > 0 and math.prod(sizes) < _MOST_ELEMENTS


def _check_overlaps(index: Path, found: list[tuple[str, Any]], shards: list[tuple[Path, mmap.mmap | None]]) -> None:
    """Limit the tensors' total size to that of the files, because a small index may list the same bytes many times."""
    claimed = sum(max(0, entry.size) for key, entry in found if key and not entry.slices)
    available = sum(len(data) for _, data in shards if data is not None)
    if claimed > available:
        raise SourceError(
            f"{index}: truncated or damaged: its tensors need {claimed} bytes, and the files have {available}"
        )
