"""Limits the free memory that the C library keeps, and returns it to the system when the server is idle.

By default glibc has up to eight arenas per core, and keeps up to 64 MiB at the end of each once a message of megabytes
was freed. It does not return that memory even when asked to: 36 messages of 32 MiB left a server of 112 MiB at 325 MiB.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable

from bf16kit.system.controlgroup import find_malloc_trim
from service.config.periodic import PeriodicThread

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # parameter numbers of mallopt
# Smaller blocks come from the heap. glibc's own threshold rises to this value as large blocks are freed. Mapping each
# block anew would double the time of an 8 MiB request, because of page faults.
_MMAP_BYTES = 32 << 20
_KEPT_BYTES = 8 << 20  # bytes kept at the end of each arena, for the next messages
_ARENAS = 2  # more arenas gain nothing: Python's lock lets few allocations run at once
_IDLE = 0.1  # of one core's time: below this the server is idle
# CPU seconds since the last trim that make another, of some 3 ms, worthwhile. Not more: on a busy machine a trim may
# come before the last requests of a burst, and their memory would stay until an idle server has worked this long.
_MIN_WORK_S = 0.03
_TICK_S = 2.0


def bound_heap() -> None:
    """Limit the free memory that glibc keeps, unless the operator has set its options.

    Call it before any thread starts: each thread chooses its arena once. Other C libraries are left alone.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in ((_ARENA_MAX, _ARENAS), (_MMAP_THRESHOLD, _MMAP_BYTES), (_TRIM_THRESHOLD, _KEPT_BYTES)):
            mallopt(parameter, value)


class HeapTrimmer:
    """Returns free memory to the system as soon as the process is idle, on a thread of its own."""

    def __init__(
        self,
        trim: Callable[[], object] | None = None,
        busy_seconds: Callable[[], float] = time.process_time,
        tick_s: float = _TICK_S,
    ) -> None:
        self._trim = trim or find_malloc_trim()
        self._busy_seconds = busy_seconds
        self._tick_s = tick_s
        self._busy, self._trimmed = busy_seconds(), -_MIN_WORK_S  # CPU seconds at the last tick, at the last trim
        self._ticking = PeriodicThread("heap", tick_s, self._tick)

    def start(self) -> None:
        if self._trim is not None:
            self._ticking.start()

    def stop(self) -> None:
        self._ticking.stop()

    def _tick(self) -> None:
        self._busy, before = self._busy_seconds(), self._busy
        if self._trim and self._busy - before <= _IDLE * self._tick_s and self._busy - self._trimmed >= _MIN_WORK_S:
            self._trim()
            self._trimmed = self._busy = self._busy_seconds()
