"""The memory that the C library keeps for later: bounded, and given back when the server has nothing to do.

Left alone, glibc keeps up to 64 MiB at the end of each of eight arenas per core, once a message of megabytes was freed,
and does not give it back when it is asked to: 36 messages of 32 MiB left a server of 112 MiB at 325.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable

from bf16kit.heap import trimmer
from service.process.ticking import Ticking

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # mallopt's names for them
# What is smaller comes from the heap. This is where glibc arrives by itself when large blocks are freed: mapping each
# anew costs twice the time of a request of 8 MiB, in page faults.
_MAPPED_FROM = 32 << 20
_KEPT = 8 << 20  # bytes at the end of each arena, for the next messages
_ARENAS = 2  # of what Python's lock lets run at once, more of them make nothing faster
_IDLE = 0.1  # of one core's time: with less than this the server has nothing to do
_WORK_S = 0.1  # of work since the last trim: it is worth another
_TICK_S = 2.0


def bound_heap() -> None:
    """Bound what glibc keeps; nothing where the operator has said something about it, or for another C library.

    Call it before there are threads: each chooses its arena once.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for what, value in ((_ARENA_MAX, _ARENAS), (_MMAP_THRESHOLD, _MAPPED_FROM), (_TRIM_THRESHOLD, _KEPT)):
            mallopt(what, value)


class HeapTrimmer:
    """Gives free memory back in the first seconds in which the process has nothing to do, on a thread of its own."""

    def __init__(
        self,
        trim: Callable[[], object] | None = None,
        busy_seconds: Callable[[], float] = time.process_time,
        tick_s: float = _TICK_S,
    ) -> None:
        self._trim = trim or trimmer()
        self._busy_seconds = busy_seconds
        self._tick_s = tick_s
        self._busy, self._trimmed = busy_seconds(), -_WORK_S  # seconds of work by the last tick, by the last trim
        self._ticking = Ticking("heap", tick_s, self._tick)

    def start(self) -> None:
        if self._trim is not None:
            self._ticking.start()

    def stop(self) -> None:
        self._ticking.stop()

    def _tick(self) -> None:
        self._busy, before = self._busy_seconds(), self._busy
        if self._trim and self._busy - before <= _IDLE * self._tick_s and self._busy - self._trimmed >= _WORK_S:
            self._trim()
            self._trimmed = self._busy = self._busy_seconds()
