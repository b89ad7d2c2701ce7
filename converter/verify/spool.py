"""Outputs kept on disk: 200 samples of 128 tokens over 50,000 words take 5 GB, too much for a conversion's memory."""

from __future__ import annotations

import math
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np

from bf16kit.runtime.memory.scratch import on_disk
from converter.source import Array, Feeds

_ALIGNMENT = 64  # bytes


@dataclass(frozen=True, slots=True)
class _StoredArray:
    """The place of an array in the file."""

    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Spool(Sequence[Feeds]):
    """A sequence of outputs in a temporary file, each mapped while it is read.

    The file is in ``directory``, or where :func:`~scratch.on_disk` says. It has no name, so nothing is
    left of it, however the process ends. Arrays come back read-only, bit for bit as they were appended. Strings cannot
    be mapped and stay in memory.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._file = tempfile.TemporaryFile(dir=on_disk(directory), buffering=0)  # noqa: SIM115 - open as long as this object
        weakref.finalize(self, self._file.close)  # closed with this object at the latest
        self._end = 0
        self._entries: list[dict[str, _StoredArray | Array]] = []

    def append(self, outputs: Feeds) -> None:
        """Write ``outputs`` to the end of the file; raise OSError if there is no space."""
        self._entries.append({name: self._write(array) for name, array in outputs.items()})

    def close(self) -> None:
        """Release the file's space. Arrays that are still in use stay readable."""
        self._file.close()

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, index: int) -> Feeds: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Feeds]: ...
    def __getitem__(self, index: int | slice) -> Feeds | Sequence[Feeds]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return {name: self._read(place) for name, place in self._entries[index].items()}

    def _write(self, array: Array) -> _StoredArray | Array:
        if array.dtype.hasobject:
            return array
        place = _StoredArray(self._end, array.dtype, array.shape)
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        self._file.seek(place.offset)
        while data:  # a raw file may write less than it was given
            data = data[self._file.write(data) or 0 :]
        self._end += place.nbytes + -place.nbytes % _ALIGNMENT
        return place

    def _read(self, place: _StoredArray | Array) -> Array:
        if isinstance(place, np.ndarray):
            return place
        if place.nbytes == 0:  # cannot be mapped
            return np.empty(place.shape, place.dtype)
        raw = np.memmap(self._file, np.uint8, mode="r", offset=place.offset, shape=(place.nbytes,))
        return raw.view(np.ndarray).view(place.dtype).reshape(place.shape)
