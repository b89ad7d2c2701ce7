"""Where copied weights lie: in memory of this process, or in memory that several processes share.

Whoever copies weights asks a :class:`WeightStore` for the place. The default is :data:`OWN`; one that shares is handed
down by whoever starts several processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bf16kit.runtime.ownmemory import own_memory

#: Writes all of the bytes it is given, and keeps no reference to them. It raises where they cannot be what they must.
Fill = Callable[[NDArray[np.uint8]], None]


class WeightStore(Protocol):
    """Keeps bytes by key. Whoever holds an array that :meth:`get` returned, or a view of it, keeps what is in it."""

    def get(self, key: str, size: int, fill: Fill) -> NDArray[np.uint8]:
        """``size`` bytes, one at least, as ``fill`` writes them, from a multiple of 2 MiB on and not to be written to.

        ``key`` says what they are: whoever asks with the same key and size would fill them with the same bytes.
        ``fill`` is not called where they are there already.

        Raises what ``fill`` raises, and :class:`MemoryError` where there is no room.
        """
        ...


class OwnMemory:
    """A :class:`WeightStore` that shares nothing: each time new memory, in large pages where the system has them."""

    def get(self, key: str, size: int, fill: Fill) -> NDArray[np.uint8]:
        """See :class:`WeightStore`."""
        memory = own_memory(size)
        fill(memory)
        memory.flags.writeable = False
        return memory


OWN = OwnMemory()


class Remembering:
    """A :class:`WeightStore` that asks another one, and for the same key and size once: for sessions of one model that
    are loaded together. It is to be forgotten when they are: what it gave stays with those who hold it."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self.given: dict[tuple[str, int], NDArray[np.uint8]] = {}

    def get(self, key: str, size: int, fill: Fill) -> NDArray[np.uint8]:
        """See :class:`WeightStore`."""
        if (key, size) not in self.given:
            self.given[key, size] = self._store.get(key, size, fill)
        return self.given[key, size]
