"""Leases on a generation: it is closed when the last one is released, or at a deadline."""

from __future__ import annotations

import math
import threading
import time
from types import TracebackType
from typing import Generic, TypeVar

_Leased = TypeVar("_Leased")


class Leases:
    """Counts the holders of one object, and grants no lease after :meth:`end`."""

    def __init__(self) -> None:
        self._unused = threading.Condition(threading.Lock())
        self._count = 0
        self._ended = False

    def acquire(self) -> bool:
        """Get a lease. Returns False after :meth:`end`."""
        with self._unused:
            if not self._ended:
                self._count += 1
            return not self._ended

    def release(self) -> None:
        with self._unused:
            self._count -= 1
            if not self._count and self._ended:
                self._unused.notify_all()

    def end(self) -> None:
        """Grant no more leases. Those that are in use stay valid."""
        with self._unused:
            self._ended = True

    def wait(self, deadline: float) -> bool:
        """Wait for the last lease; return False if one is still in use at ``deadline``.

        ``deadline`` is in :func:`time.monotonic` seconds; inf means no limit.
        """
        with self._unused:
            timeout = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
            return self._unused.wait_for(lambda: not self._count, timeout)


class Lease(Generic[_Leased]):
    """A context that holds a lease on ``leased``. The caller has acquired the lease from ``leases`` already."""

    __slots__ = ("_leased", "_leases")

    def __init__(self, leases: Leases, leased: _Leased) -> None:
        self._leases = leases
        self._leased = leased

    def __enter__(self) -> _Leased:
        return self._leased

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leases.release()
