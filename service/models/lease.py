"""Leases on a generation: it is closed when the last one is given back, or at a deadline."""

from __future__ import annotations

import math
import threading
import time
from types import TracebackType
from typing import Generic, TypeVar

_Held = TypeVar("_Held")


class Leases:
    """Counts the holders of one object, and grants no lease after :meth:`end`."""

    def __init__(self) -> None:
        self._nobody = threading.Condition(threading.Lock())
        self._count = 0
        self._ended = False

    def take(self) -> bool:
        """Take a lease. Returns False after :meth:`end`."""
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
        """Grant no more leases. Those that are held stay valid."""
        with self._nobody:
            self._ended = True

    def wait(self, deadline: float) -> bool:
        """Wait for the last lease; return False if one is still held at ``deadline``.

        ``deadline`` is in :func:`time.monotonic` seconds; inf means no limit.
        """
        with self._nobody:
            timeout = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
            return self._nobody.wait_for(lambda: not self._count, timeout)


class Lease(Generic[_Held]):
    """A context that holds a lease on ``held``. The caller has taken the lease from ``leases`` already."""

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
