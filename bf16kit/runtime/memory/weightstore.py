"""Stores for copied weights: in memory of this process, or in memory that several processes share.

Code that copies weights asks a :class:`WeightStore` for memory. The default is :data:`PRIVATE_STORE`; a program that
starts several processes passes a store that shares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bf16kit.runtime.memory.ownmemory import allocate_in_large_pages

#: Writes all of the bytes it is given, and keeps no reference to them. It raises if the bytes cannot be right.
Fill = Callable[[NDArray[np.uint8]], None]


class WeightStore(Protocol):
    """Keeps bytes by key, as long as an array that :meth:`get` returned, or a view of it, exists."""

    def get(self, key: str, size: int, fill: Fill) -> NDArray[np.uint8]:
        """Return ``size`` bytes (at least one) as ``fill`` writes them: aligned to 2 MiB, read-only.

        ``key`` identifies the content: callers with the same key and size would fill the memory with the same bytes.
        ``fill`` is not called if the bytes exist already.

        Raises what ``fill`` raises, and :class:`MemoryError` when there is no room.
        """
        ...


class PrivateWeightStore:
    """A :class:`WeightStore` that shares nothing: new memory for each call, in large pages if the system has them."""

    def get(self, key: str, size: int, fill: Fill) -> NDArray[np.uint8]:
        """See :class:`WeightStore`."""
        memory = allocate_in_large_pages(size)
        fill(memory)
        memory.flags.writeable = False
        return memory


PRIVATE_STORE = PrivateWeightStore()


class CachingWeightStore:
    """A :class:`WeightStore` that asks another one only once per key and size.

    It is for sessions of one model that are loaded together. Drop it after loading: the arrays stay with the sessions.
    """

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self.arrays: dict[tuple[str, int], NDArray[np.uint8]] = {}

    def get(self, key: str, size: int, fill: Fill) -> NDArray[np.uint8]:
        """See :class:`WeightStore`."""
        if (key, size) not in self.arrays:
            self.arrays[key, size] = self._store.get(key, size, fill)
        return self.arrays[key, size]
