"""Memory for weights: sealed, aligned and in large pages where it is shared; files that take none between runs."""

import ctypes
import errno
import fcntl
import gc
import mmap
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from containers import in_container
from mapped import deleted_kb
from numpy.typing import NDArray
from openfiles import files_of_at_most

from bf16kit.runtime.memory.filestore import FileWeightStore
from bf16kit.runtime.memory.weightstore import LARGE_PAGE, PRIVATE_STORE, create_filled, map_read_only
from bf16kit.system.controlgroup import RESERVE

SIZE, FILE = 2 * LARGE_PAGE + 4321, 4 << 20


def fill(memory: NDArray[np.uint8]) -> None:
    memory[:] = np.arange(memory.size) % 251


def descriptors(of: str = "") -> list[str]:
    """Return the open descriptors of this process whose files have ``of`` in their names."""
    found = Path("/proc/self/fd").iterdir()
    return sorted(each.name for each in found if of in os.path.realpath(each))


@pytest.fixture(scope="module")
def descriptor() -> Iterator[int]:
    filled = create_filled(SIZE, fill)
    yield filled
    os.close(filled)  # other tests count the copies that this process has open


def test_filled_memory_is_mapped_read_only_and_aligned(descriptor: int) -> None:
    _, memory = map_read_only(descriptor, SIZE)
    assert memory.nbytes == SIZE
    assert memory.ctypes.data % LARGE_PAGE == 0
    np.testing.assert_array_equal(memory, np.arange(SIZE) % 251)
    with pytest.raises(ValueError, match="read-only"):
        memory[0] = 1
    with pytest.raises(ValueError, match="cannot set WRITEABLE"):
        memory.flags.writeable = True


def test_no_process_can_write_to_filled_memory_or_change_its_size(descriptor: int) -> None:
    again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
    forbidden: list[Callable[[int], object]] = [
        lambda memory: os.pwrite(memory, b"x", 0),
        lambda memory: os.ftruncate(memory, SIZE // 2),
        lambda memory: os.ftruncate(memory, SIZE * 2),
        lambda memory: mmap.mmap(memory, SIZE),
        lambda memory: fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK),
    ]
    try:
        for attempt in forbidden:
            for memory in (descriptor, again):
                with pytest.raises(PermissionError):
                    attempt(memory)
    finally:
        os.close(again)


def test_all_of_the_memory_is_allocated_before_it_is_filled() -> None:
    """If a page could not be allocated when it is written, the process would be killed."""
    taken: list[int] = []

    def look(memory: NDArray[np.uint8]) -> None:
        taken.extend(os.fstat(int(each)).st_blocks * 512 for each in descriptors("memfd:bf16kit-weights"))

    os.close(create_filled(SIZE, look))
    assert min(taken) >= SIZE


def test_a_mapping_is_removed_with_the_last_view_of_it(descriptor: int) -> None:
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:bf16kit-weights")

    before = mappings()
    _, memory = map_read_only(descriptor, SIZE)
    view = memory[LARGE_PAGE : LARGE_PAGE + 1000].view(np.int8)
    del _, memory
    gc.collect()
    assert mappings() == before + 1
    assert view[0] == LARGE_PAGE % 251
    del view
    gc.collect()
    assert mappings() == before


def test_shared_memory_is_in_large_pages_if_the_system_can_make_them(descriptor: int) -> None:
    if tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < (6, 1):
        pytest.skip("MADV_COLLAPSE came with Linux 6.1")
    _, memory = map_read_only(descriptor, SIZE)
    memory.sum()
    found = _in_large_pages(memory.ctypes.data)
    if not found and not _made_large(memory):
        pytest.skip("this system makes no large pages of shared memory, or has none free")
    assert found == SIZE // LARGE_PAGE * LARGE_PAGE


def _made_large(memory: NDArray[np.uint8]) -> bool:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return bool(madvise(memory.ctypes.data, LARGE_PAGE, 25) == 0)


def _in_large_pages(address: int) -> int:
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if (match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)) and int(match[1], 16) == address:
            return next(int(each.split()[1]) * 1024 for each in lines if each.startswith("ShmemPmdMapped:"))
    raise AssertionError(f"nothing is mapped at {address:x}")


def test_a_lack_of_memory_is_a_memory_error_at_each_step_and_no_failure_leaves_a_descriptor(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = descriptors()
    kept: list[NDArray[np.uint8]] = []
    with pytest.raises(BufferError):  # the filling function keeps the memory
        create_filled(SIZE, kept.append)
    with pytest.raises(MemoryError):
        map_read_only(descriptor, 1 << 62)
    with pytest.raises(MemoryError):
        create_filled(1 << 60, fill)
    with files_of_at_most(SIZE), pytest.raises(MemoryError):
        create_filled(SIZE + 1, fill)

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(MemoryError):
        create_filled(SIZE, fill)
    assert descriptors() == before


@pytest.mark.parametrize(
    "make", [lambda size: create_filled(size, fill), lambda size: PRIVATE_STORE.get("", size, fill)]
)
def test_more_than_the_containers_limit_is_a_memory_error(
    make: Callable[[int], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux would allow the attempt and then kill the container."""
    in_container(monkeypatch, tmp_path, limit=128 << 20, left=RESERVE + (3 << 20))
    expected = "no room for 4 MB of weights: 70 MB are left of the 134 MB that this container may take"
    with pytest.raises(MemoryError, match=expected):
        make(4 << 20)
    if isinstance(made := make(3 << 20), int):
        os.close(made)


# --- in nameless files: the same bytes as in memory, and no memory between runs ---------------------------------------


def test_weights_in_a_file_take_no_memory_until_they_are_read_again_and_no_space_after_the_last_array(
    tmp_path: Path,
) -> None:
    before, store = deleted_kb(), FileWeightStore(tmp_path)
    memory = store.get("", FILE, fill)
    assert list(tmp_path.iterdir()) == []
    for _ in range(2):
        np.testing.assert_array_equal(memory, np.arange(FILE) % 251)
        assert deleted_kb() == before + (FILE >> 10)
        store.drop_pages()
        assert deleted_kb() == before
    with pytest.raises(ValueError, match="cannot set WRITEABLE"):
        memory.flags.writeable = True
    view = memory[100:200]
    del memory
    assert view[0] == 100
    del view
    assert deleted_kb() == before
    store.drop_pages()


@pytest.mark.parametrize("directory", ["/dev/shm", "nowhere"])
def test_weights_are_in_memory_where_no_disk_has_room_for_them(directory: str) -> None:
    """A file there would be memory as well, in small pages."""
    before, store = deleted_kb(), FileWeightStore(Path(directory))
    memory = store.get("", FILE, fill)
    store.drop_pages()
    np.testing.assert_array_equal(memory, np.arange(FILE) % 251)
    assert deleted_kb() == before
