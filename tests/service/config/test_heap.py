"""The memory that the C library keeps is limited, and returned to the system when the process is idle."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading

import pytest
from waiting import until

from service.config.resources import HeapTrimmer

# Allocates and frees 64 times 4 MiB on eight threads, and prints how many MiB the C library keeps after malloc_trim.
_CHURN = """
import ctypes, sys, threading
from pathlib import Path
from service.config.resources import bound_heap
def resident_bytes():
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])
if sys.argv[1] == "bound":
    bound_heap()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def churn(barrier):
    held = [libc.malloc(4 << 20) for _ in range(8)]
    for block in held:
        ctypes.memset(ctypes.c_void_p(block), 1, 4 << 20)
    barrier.wait()
    for block in held:
        libc.free(block)
    barrier.wait()
libc.free(libc.malloc(31 << 20))  # as after any large message: from now on glibc keeps twice as much
before, barrier = resident_bytes(), threading.Barrier(8)
threads = [threading.Thread(target=churn, args=(barrier,)) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
libc.malloc_trim(0)
print((resident_bytes() - before) >> 20)
"""


def _kept(how: str) -> int:
    command = [sys.executable, "-c", _CHURN, how]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc's malloc is not here")
def test_bounding_the_heap_limits_the_memory_that_the_c_library_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    assert _kept("bound") < 128 < _kept("as it is")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", str(1 << 30))
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(32 << 20))
    assert _kept("bound") > 128, "what the operator has set stays"


class _Process:
    def __init__(self) -> None:
        self.busy = 0.0
        self.working = False
        self.trims = 0
        self.asked = threading.Semaphore(0)

    def trim(self) -> None:
        self.trims += 1

    def busy_seconds(self) -> float:
        self.busy += 0.01 if self.working else 0.0
        self.asked.release()
        return self.busy

    def seen_twice(self) -> None:
        """Return when the trimmer has checked twice from now on, and so has acted on its first check."""
        while self.asked.acquire(blocking=False):
            pass
        for _ in range(3):
            assert self.asked.acquire(timeout=20)


def test_memory_is_returned_once_when_idle_and_again_after_the_next_work() -> None:
    process = _Process()
    process.working = True
    trimmer = HeapTrimmer(process.trim, process.busy_seconds, tick_s=0.002)
    trimmer.start()
    try:
        process.seen_twice()
        assert process.trims == 0
        for times in (1, 2):
            process.working = False
            until(lambda times=times: process.trims == times)  # type: ignore[misc]
            process.seen_twice()
            assert process.trims == times
            process.working = True
            until(lambda until_then=process.busy + 0.2: process.busy > until_then)  # type: ignore[misc]
    finally:
        trimmer.stop()


def test_a_trimmer_with_the_real_functions_starts_and_stops() -> None:
    trimmer = HeapTrimmer(tick_s=0.001)
    trimmer.start()
    trimmer.stop()
    HeapTrimmer().stop()
