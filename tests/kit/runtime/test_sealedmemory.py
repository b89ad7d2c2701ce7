"""Sealed shared memory: no process can write to it or truncate it, and its receiver checks it before use."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bf16kit.runtime.memory import weightstore
from bf16kit.runtime.memory.weightstore import UnfitMemory, allocate_in_large_pages
from bf16kit.system import controlgroup
from bf16kit.system.controlgroup import RESERVE, Memory

SIZE = 8192
SEALS = ["F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_WRITE", "F_SEAL_SEAL"]


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = weightstore.create(SIZE)
    yield descriptor
    os.close(descriptor)


def test_sealed_memory_can_only_be_read(memory: int) -> None:
    os.pwrite(memory, b"weights", 0)
    weightstore.seal(memory)
    weightstore.check(memory, SIZE)
    with pytest.raises(PermissionError):
        os.pwrite(memory, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(memory, SIZE // 2)
    with pytest.raises(PermissionError):
        os.ftruncate(memory, SIZE * 2)
    with pytest.raises(PermissionError):
        mmap.mmap(memory, SIZE)
    with pytest.raises(PermissionError):
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    assert os.pread(memory, 7, 0) == b"weights"


def test_sealed_memory_cannot_be_written_through_another_descriptor(memory: int) -> None:
    weightstore.seal(memory)
    again = os.open(f"/proc/self/fd/{memory}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            os.pwrite(again, b"x", 0)
    finally:
        os.close(again)


def test_memory_that_is_mapped_for_writing_cannot_be_sealed(memory: int) -> None:
    with mmap.mmap(memory, SIZE), pytest.raises(OSError, match=os.strerror(errno.EBUSY)):
        weightstore.seal(memory)


@pytest.mark.parametrize("missing", SEALS)
def test_memory_without_one_of_the_seals_is_rejected(memory: int, missing: str) -> None:
    others = sum(getattr(fcntl, name) for name in SEALS if name != missing)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, others)
    with pytest.raises(UnfitMemory, match=f"it is not sealed: {missing} missing"):
        weightstore.check(memory, SIZE)


@pytest.mark.parametrize("size", [SIZE - 1, SIZE + 1])
def test_memory_of_another_size_is_rejected(memory: int, size: int) -> None:
    weightstore.seal(memory)
    with pytest.raises(UnfitMemory, match=f"it has {SIZE} bytes, expected {size}"):
        weightstore.check(memory, size)


def test_a_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(SIZE))
    with (tmp_path / "file").open("rb") as file, pytest.raises(UnfitMemory, match="not memory that can be sealed"):
        weightstore.check(file.fileno(), SIZE)


def test_a_lack_of_memory_is_a_memory_error_at_each_step(memory: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = descriptors()
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE, hard))
    try:
        with pytest.raises(MemoryError, match="no room for 0 MB of weights: File too large"):
            weightstore.create(SIZE + 1)
        with pytest.raises(MemoryError, match="no room for 0 MB of weights: File too large"):
            weightstore.reserve(memory, SIZE + 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert descriptors() == before


def test_reserved_memory_is_allocated(memory: int) -> None:
    assert os.fstat(memory).st_blocks == 0
    weightstore.reserve(memory, SIZE)
    assert os.fstat(memory).st_blocks * 512 >= SIZE


def descriptors() -> list[str]:
    return sorted(each.name for each in Path("/proc/self/fd").iterdir())


def test_more_than_the_machine_has_is_a_memory_error_and_leaves_no_descriptor() -> None:
    before = descriptors()
    with pytest.raises(MemoryError, match=r"no room for \d+ MB of weights"):
        weightstore.create(1 << 60)
    assert descriptors() == before


@pytest.mark.parametrize("make", [weightstore.create, allocate_in_large_pages])
def test_more_than_the_containers_limit_is_a_memory_error(
    make: Callable[[int], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux would allow the attempt and then kill the container."""
    monkeypatch.setattr(controlgroup, "memory", lambda: Memory(limit=128 << 20, left=RESERVE + (3 << 20)))
    expected = "no room for 4 MB of weights: 70 MB are left of the 134 MB that this container may take"
    with pytest.raises(MemoryError, match=expected):
        make(4 << 20)
    if isinstance(made := make(3 << 20), int):
        os.close(made)
