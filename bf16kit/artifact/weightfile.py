"""Writing weights: tensors appended to one file, aligned for mapping."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bf16kit.artifact.manifest import Segment

ALIGNMENT = 64  # bytes: a cache line, and the widest vector load


class WeightWriter(AbstractContextManager["WeightWriter"]):
    """Appends tensors to a new file; each starts at a multiple of :data:`ALIGNMENT` bytes, zeros between."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("xb")

    def append(self, array: NDArray[Any]) -> Segment:
        """Write ``array`` in C order, little-endian; return its segment. A contiguous array is not copied."""
        return self.append_chunks([little_endian_bytes(array)])

    def append_chunks(self, chunks: Iterable[bytes | memoryview]) -> Segment:
        """Write pieces one after the other as one segment, which need not fit in memory."""
        self._file.write(bytes(-self._file.tell() % ALIGNMENT))
        start = self._file.tell()
        for chunk in chunks:
            self._file.write(chunk)
        return Segment(offset=start, bytes=self._file.tell() - start)

    def close(self) -> None:
        """Close the file. May be called again."""
        self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def little_endian_bytes(array: NDArray[Any]) -> memoryview:
    """Return the bytes of ``array`` in C order, little-endian; a view if the array is contiguous."""
    little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
    return little.reshape(-1).view(np.uint8).data
