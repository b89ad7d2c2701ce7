"""The bound on what the transport holds at once: more is refused at the door, where the caller sees it."""

from __future__ import annotations

import threading
from types import TracebackType

from bf16kit.errors import Overloaded


class Admission:
    """Counts those inside, at most ``limit``. A context manager that raises :class:`Overloaded` when full."""

    def __init__(self, limit: int, what: str) -> None:
        self._limit = limit
        self._what = what
        self._inside = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            if self._inside >= self._limit:
                raise Overloaded(f"{self._limit} {self._what} is the limit of this server; try again later")
            self._inside += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:
            self._inside -= 1
