"""A store of weights in nameless files: memory that the system, or the program itself, can take back between runs."""

from __future__ import annotations

import mmap
from pathlib import Path
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from bf16kit.runtime.memory.scratch import ScratchUnavailable, scratch_file
from bf16kit.runtime.memory.weightstore import PRIVATE_STORE, Fill


class FileWeightStore:
    """A :class:`~bf16kit.runtime.memory.weightstore.WeightStore` in temporary files in ``directory``.

    ``directory`` None is the system's. Weights for which it has no room, or that it would keep in memory, are in memory
    of the process instead.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._mappings: WeakSet[mmap.mmap] = WeakSet()  # each lives as long as its array

    def get(self, key: str, size: int, fill: Fill) -> NDArray[np.uint8]:
        """See :meth:`bf16kit.runtime.memory.weightstore.WeightStore.get`."""
        try:
            with scratch_file(size, self._directory) as (path, memory):
                fill(memory)
                del memory
                with path.open("rb") as file:
                    mapping = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
        except (ScratchUnavailable, OSError):  # or no descriptor or address is left
            return PRIVATE_STORE.get(key, size, fill)
        self._mappings.add(mapping)
        return np.frombuffer(mapping, np.uint8)

    def drop_pages(self) -> None:
        """Take no memory for the weights until they are read again, from the system's cache of files or the disk."""
        for mapping in self._mappings:
            mapping.madvise(mmap.MADV_DONTNEED)
