"""Long-lived objects are visited once, garbage is freed, and the garbage collector's state is restored."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator

import pytest

from converter.process.memory import FrozenHeap, keep_few_primitives, release_memory


class Knot:
    """An object that refers to itself, so that only the garbage collector frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def nothing_set_aside() -> Iterator[None]:
    """Unfreeze all objects, as in a process in which only the conversion sets objects aside."""
    gc.unfreeze()
    yield
    gc.freeze()


def test_objects_of_the_block_are_set_aside_until_the_end() -> None:
    with FrozenHeap() as garbage:
        with garbage.without_collection():
            kept = Knot()
        assert not any(each is kept for each in gc.get_objects())
        garbage.collect()
        assert not any(each is kept for each in gc.get_objects())
    assert any(each is kept for each in gc.get_objects())
    assert gc.get_freeze_count() == 0


def test_objects_that_become_garbage_later_are_freed_by_settle() -> None:
    with FrozenHeap() as garbage:
        knot = Knot()
        alive = weakref.ref(knot)
        garbage.collect()
        del knot
        release_memory()
        assert alive() is not None, "it was set aside"
        garbage.collect()
        assert alive() is None


def test_nothing_stays_set_aside_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), FrozenHeap() as garbage, garbage.without_collection():
        raise ZeroDivisionError
    assert gc.get_freeze_count() == 0
    assert gc.isenabled()


def test_objects_that_the_calling_program_set_aside_stay_so() -> None:
    kept = Knot()
    gc.freeze()
    with FrozenHeap() as garbage:
        garbage.collect()
        alive = weakref.ref(Knot())
        garbage.collect()
        assert alive() is None
    assert not any(each is kept for each in gc.get_objects())


def test_onednn_keeps_few_kernels_unless_the_environment_sets_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"  # bench/conversion/memory.py measures its effect
    monkeypatch.setenv(name, "7")
    keep_few_primitives()
    assert os.environ[name] == "7"
    monkeypatch.delenv(name)
    keep_few_primitives()
    assert os.environ[name] == "16"
