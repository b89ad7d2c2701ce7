"""What one process may use: the C library's memory, Python's garbage, open files, a small container's memory."""

import ctypes
import gc
import logging
import os
import resource
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from bf16kit.service.config.resources import HeapTrimmer, announce, collect_and_freeze, fit_to_memory, max_request_bytes
from bf16kit.service.config.serverconfig import ServerConfig, load_config
from bf16kit.system.controlgroup import Memory

MIB = 1 << 20
# Allocates and frees 64 times 4 MiB on eight threads, and prints how many MiB the C library keeps after malloc_trim.
_CHURN = """
import ctypes, sys, threading
from pathlib import Path
from bf16kit.system import controlgroup
from bf16kit.service.config.resources import bound_heap
def resident_bytes():
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])
if sys.argv[1] != "as it is":
    small = controlgroup.Memory(1 << 30, 1 << 30, 0)
    controlgroup.memory = lambda: small if sys.argv[1] == "small" else None
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


@pytest.mark.long
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc's malloc is not here")
def test_bounding_the_heap_limits_the_memory_that_the_c_library_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    assert _kept("bound") < 128 < _kept("as it is")
    assert _kept("small") < 8, "a small container can spare less"
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", str(1 << 30))
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(32 << 20))
    assert _kept("bound") > 128, "what the operator has set stays"


def test_memory_is_returned_once_when_idle_and_again_after_the_next_work() -> None:
    busy, step, trims = 0.0, 0.01, list[float]()
    checked = threading.Semaphore(0)

    def busy_seconds() -> float:
        nonlocal busy
        busy += step
        checked.release()
        return busy

    def checked_twice() -> None:
        while checked.acquire(blocking=False):
            pass
        for _ in range(3):
            assert checked.acquire(timeout=20)

    trimmer = HeapTrimmer(lambda: trims.append(busy), busy_seconds, tick_s=0.002)
    trimmer.start()
    try:
        checked_twice()
        assert trims == []
        for times in (1, 2):
            step = 0.0
            until(lambda times=times: len(trims) == times)  # type: ignore[misc]
            checked_twice()
            assert len(trims) == times
            step = 0.01
            until(lambda enough=busy + 0.2: busy > enough)  # type: ignore[misc]
    finally:
        trimmer.stop()


class Cyclic:
    """An object that refers to itself, so that only the garbage collector frees it."""

    def __init__(self) -> None:
        self.itself: Any = self


@pytest.mark.long
def test_objects_that_stay_are_not_searched_again_until_they_are_garbage() -> None:
    kept, cyclic = [Cyclic() for _ in range(1000)], Cyclic()
    seen = weakref.ref(cyclic)
    try:
        collect_and_freeze()
        assert gc.get_freeze_count() >= 1000
        assert not any(found is kept[0] for found in gc.get_objects())
        del cyclic
        gc.collect()
        assert seen() is not None  # frozen: not collected
        collect_and_freeze()
        assert seen() is None
    finally:
        gc.unfreeze()


def test_the_soft_limit_of_open_files_is_raised_to_the_hard_one() -> None:
    """Tested in a separate process: a hard limit cannot be raised again."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))\n"
        "from bf16kit.service.config.resources import raise_open_file_limit; raise_open_file_limit()\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (512, 512)"
    )
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 512:
        pytest.skip("this system's hard limit is lower still")
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))


def config(tmp_path: Path, **flags: object) -> ServerConfig:
    return load_config({"repository": str(tmp_path), **flags})


@pytest.mark.parametrize(
    ("mib", "workers", "requests", "message"),
    [(1024, 1, 256, 64), (128, 1, 32, 32), (1024, 4, 64, 64), (1, 2, 1, 1), (1 << 16, 1, 512, 64)],
)
def test_requests_get_a_quarter_of_a_small_container(
    tmp_path: Path, mib: int, workers: int, requests: int, message: int
) -> None:
    memory = Memory(limit=mib * MIB, left=0)
    found = fit_to_memory(config(tmp_path, workers=workers), memory)
    assert (max_request_bytes(found, memory), found.max_message_bytes) == (requests * MIB, message * MIB)


def test_without_a_limit_and_where_it_is_configured_nothing_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fit_to_memory(config(tmp_path), None) == config(tmp_path)
    assert max_request_bytes(config(tmp_path), None) == 512 * MIB
    monkeypatch.setenv("BF16KIT_MAX_MESSAGE_BYTES", str(300 * MIB))
    small = Memory(limit=128 * MIB, left=100 * MIB)
    found = fit_to_memory(config(tmp_path), small)
    assert (max_request_bytes(found, small), found.max_message_bytes) == (32 * MIB, 300 * MIB)


def test_the_log_states_the_containers_limit_and_warns_if_it_is_too_small_for_any_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    small = Memory(limit=512 * MIB, left=500 * MIB)
    announce(fit_to_memory(config(tmp_path), small), small)
    announce(config(tmp_path), None)
    (told,) = caplog.messages
    assert told.endswith("requests may use 134217728 bytes of it, one message at most 67108864")
    announce(config(tmp_path), Memory(limit=64 * MIB, left=30 * MIB))
    assert "67 MB are too little for a server, even without a model" in caplog.messages[-1]
    assert "give the container 101 MB plus what its models take" in caplog.messages[-1]
