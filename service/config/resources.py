"""What one process may use: the C library's memory, Python's garbage, open files, a container's memory.

By default glibc has up to eight arenas per core, and keeps up to 64 MiB at the end of each once a message of megabytes
was freed. It does not return that memory even when asked to: 36 messages of 32 MiB left a server of 112 MiB at 325 MiB.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import resource
import time
from collections.abc import Callable

from bf16kit.service.config.loops import PeriodicThread
from bf16kit.service.config.serverconfig import ServerConfig
from bf16kit.system import controlgroup
from bf16kit.system.controlgroup import Memory, find_malloc_trim

_log = logging.getLogger(__name__)
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # parameter numbers of mallopt
# Smaller blocks come from the heap. glibc's own threshold rises to this value as large blocks are freed. Mapping each
# block anew would double the time of an 8 MiB request, because of page faults.
_MMAP_BYTES = 32 << 20
_KEPT_BYTES = 8 << 20  # bytes kept at the end of each arena, for the next messages
# In a container of this size or smaller, both are 1 MiB: in one of 512 MiB, twenty requests of 4 MiB at once left so
# much free memory in the heap that the system killed the server.
_SMALL_CONTAINER, _SMALL_BYTES = 2 << 30, 1 << 20
_ARENAS = 2  # more arenas gain nothing: Python's lock lets few allocations run at once
# CPU seconds since the last trim that make another, of some 3 ms, worthwhile. Not more: on a busy machine a trim may
# come before the last requests of a burst, and their memory would stay until an idle server has worked this long.
_MIN_WORK_S = 0.03
_MOST_OPEN_FILES = 65_536
MEMORY_DIVISOR = 4  # requests and responses, over all workers, may take 1/MEMORY_DIVISOR of the container's memory
_LEAST_CONTAINER = 96 << 20  # measured: enough for a server without a model, and its health check
_MESSAGES = 8  # of the largest size that requests and responses in flight may hold together
_LEAST = 1 << 20  # bytes: a server that accepts less is useless


def bound_heap() -> None:
    """Limit the free memory that glibc keeps, unless the operator has set its options.

    Call it before any thread starts: each thread chooses its arena once. Other C libraries are left alone.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        container = controlgroup.memory()
        small = container is not None and container.limit <= _SMALL_CONTAINER
        mapped, kept = (_SMALL_BYTES, _SMALL_BYTES) if small else (_MMAP_BYTES, _KEPT_BYTES)
        for parameter, value in ((_ARENA_MAX, _ARENAS), (_MMAP_THRESHOLD, mapped), (_TRIM_THRESHOLD, kept)):
            mallopt(parameter, value)


class HeapTrimmer:
    """Returns free memory to the system as soon as the process is idle, on a thread of its own."""

    def __init__(
        self,
        trim: Callable[[], object] | None = None,
        busy_seconds: Callable[[], float] = time.process_time,
        tick_s: float = 2.0,
    ) -> None:
        self._trim = trim or find_malloc_trim()
        self._busy_seconds = busy_seconds
        self._idle = 0.1 * tick_s  # CPU seconds in a tick: below a tenth of one core's time the process is idle
        self._busy, self._trimmed = busy_seconds(), -_MIN_WORK_S  # CPU seconds at the last tick, at the last trim
        self._ticking = PeriodicThread("heap", tick_s, self._tick)

    def start(self) -> None:
        if self._trim is not None:
            self._ticking.start()

    def stop(self) -> None:
        self._ticking.stop()

    def _tick(self) -> None:
        self._busy, before = self._busy_seconds(), self._busy
        if self._trim and self._busy - before <= self._idle and self._busy - self._trimmed >= _MIN_WORK_S:
            self._trim()
            self._trimmed = self._busy = self._busy_seconds()


def collect_and_freeze() -> None:
    """Collect garbage, frozen objects included, and freeze the rest. Call it after a load and after an unload.

    A server has some 75,000 objects that live as long as a model. Python would check all of them for garbage when
    enough new ones exist, for example seconds after the first load: responses were 50 to 190 ms late. All threads wait
    for this call, for tens of milliseconds.
    """
    gc.unfreeze()  # otherwise the cycles of an unloaded model would never be freed
    gc.collect()
    gc.freeze()


def raise_open_file_limit() -> None:
    """Raise the soft limit of open files: the usual 1,024 would be used up by idle connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def fit_to_memory(config: ServerConfig, memory: Memory | None) -> ServerConfig:
    """Return ``config`` with a lower ``max_message_bytes`` in a small container, unless it was set explicitly."""
    if memory is None or "max_message_bytes" in config.model_fields_set:
        return config
    return config.model_copy(update={"max_message_bytes": min(config.max_message_bytes, _share(config, memory))})


def max_request_bytes(config: ServerConfig, memory: Memory | None) -> int:
    """Return the most bytes that all requests and responses of one process may hold together."""
    wanted = _MESSAGES * config.max_message_bytes
    return wanted if memory is None else min(wanted, _share(config, memory))


def _share(config: ServerConfig, memory: Memory) -> int:
    return max(_LEAST, request_bytes(memory) // config.workers)


def request_bytes(memory: Memory) -> int:
    """Return the bytes of the container's memory that requests may use."""
    return memory.limit // MEMORY_DIVISOR


def announce(config: ServerConfig, memory: Memory | None) -> None:
    """Log the memory limit and its consequences; nothing without a limit."""
    if memory is not None:
        each = " in each worker" if config.workers > 1 else ""
        _log.info(
            "memory: %s; requests may use %d bytes of it%s, one message at most %d",
            memory,
            max_request_bytes(config, memory),
            each,
            config.max_message_bytes,
        )
        if memory.limit < _LEAST_CONTAINER:
            _log.warning(
                "memory: %.0f MB are too little for a server, even without a model: the system may kill it at any time;"
                " give the container %.0f MB plus what its models take (docker run --memory, resources.limits.memory)",
                memory.limit / 1e6,
                _LEAST_CONTAINER / 1e6,
            )
