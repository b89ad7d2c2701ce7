"""Who is still at work with a generation: it is closed when they have finished, or at a deadline."""

from __future__ import annotations

import math
import threading
import time
from types import TracebackType
from typing import Generic, TypeVar

_Held = TypeVar("_Held")


class Leases:
    """Counts the holders of one thing, and lets nobody in after :meth:`end`."""

    def __init__(self) -> None:
        self._nobody = threading.Condition(threading.Lock())
        self._count = 0
        self._ended = False

    def take(self) -> bool:
        """False: it has ended, there is nothing to hold."""
        with self._nobody:
            if not self._ended:
                self._count += 1
            return not self._ended

    def give_back(self) -> None:
        with self._nobody:
            self._count -= 1
            if not self._count and self._ended:
                self._nobody.notify_all()

    def end(self) -> None:
        """From now on nobody gets one; those who hold one keep it."""
        with self._nobody:
            self._ended = True

    def wait(self, deadline: float) -> bool:
        """False when somebody still holds one at ``deadline`` (in :func:`time.monotonic` seconds, inf = wait)."""
        with self._nobody:
            timeout = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
            return self._nobody.wait_for(lambda: not self._count, timeout)


class Lease(Generic[_Held]):
    """``held``, for as long as the context lasts. Made by whoever took the lease from ``leases``."""

    __slots__ = ("_held", "_leases")

    def __init__(self, leases: Leases, held: _Held) -> None:
        self._leases = leases
        self._held = held

    def __enter__(self) -> _Held:
        return self._held

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leases.give_back()
