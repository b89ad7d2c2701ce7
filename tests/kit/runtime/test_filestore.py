"""Weights in nameless files: the same bytes as in memory, and no memory between runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from mapped import deleted_kb
from numpy.typing import NDArray

from bf16kit.runtime.memory.filestore import FileWeightStore

SIZE = 4 << 20


def fill(memory: NDArray[np.uint8]) -> None:
    memory[:] = np.arange(memory.size) % 251


def test_weights_in_a_file_take_no_memory_until_they_are_read_again(tmp_path: Path) -> None:
    before, store = deleted_kb(), FileWeightStore(tmp_path)
    memory = store.get("", SIZE, fill)
    assert list(tmp_path.iterdir()) == []
    for _ in range(2):
        np.testing.assert_array_equal(memory, np.arange(SIZE) % 251)
        assert deleted_kb() == before + (SIZE >> 10)
        store.drop_pages()
        assert deleted_kb() == before
    assert not memory.flags.writeable
    with pytest.raises(ValueError, match="cannot set WRITEABLE"):
        memory.flags.writeable = True


def test_the_file_is_freed_with_the_last_array(tmp_path: Path) -> None:
    before, store = deleted_kb(), FileWeightStore(tmp_path)
    view = store.get("", SIZE, fill)[100:200]
    assert view[0] == 100
    store.drop_pages()
    assert view[0] == 100
    del view
    assert deleted_kb() == before
    store.drop_pages()


@pytest.mark.parametrize("directory", ["/dev/shm", "nowhere"])
def test_weights_are_in_memory_where_no_disk_has_room_for_them(directory: str) -> None:
    """A file there would be memory as well, in small pages."""
    before, store = deleted_kb(), FileWeightStore(Path(directory))
    memory = store.get("", SIZE, fill)
    np.testing.assert_array_equal(memory, np.arange(SIZE) % 251)
    store.drop_pages()
    np.testing.assert_array_equal(memory, np.arange(SIZE) % 251)
    assert deleted_kb() == before
