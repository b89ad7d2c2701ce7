"""Free memory is given back to the system on request."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from bf16kit.system.controlgroup import find_malloc_trim, release_free_memory

_BLOCKS, _BYTES = 256, 64 << 10  # small enough for the heap: glibc maps blocks of 128 KiB and more


def _resident() -> int:
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])


@pytest.mark.skipif(find_malloc_trim() is None, reason="this C library keeps what it keeps")
def test_memory_freed_below_a_block_in_use_is_given_back() -> None:
    library = ctypes.CDLL(None)
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    blocks = [library.malloc(_BYTES) for _ in range(_BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, _BYTES)
    for block in blocks[:-1]:
        library.free(block)
    before = _resident()
    release_free_memory()
    given = before - _resident()
    library.free(blocks[-1])  # it lies above the others; without it, glibc gives them back by itself
    assert given > _BLOCKS * _BYTES // 2


def test_nothing_is_done_with_another_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    assert find_malloc_trim() is None
    release_free_memory()
