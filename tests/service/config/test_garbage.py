"""Objects that stay are not searched for garbage again; those that became garbage are still found."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from service.config import resources


class Cyclic:
    """An object that refers to itself, so that only the garbage collector frees it."""

    def __init__(self) -> None:
        self.itself: Any = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_objects_that_stay_are_not_searched_again() -> None:
    kept = [Cyclic() for _ in range(1000)]
    resources.collect_and_freeze()
    assert gc.get_freeze_count() >= 1000
    assert not any(found is kept[0] for found in gc.get_objects())


def test_a_frozen_object_that_became_garbage_is_freed() -> None:
    cyclic = Cyclic()
    seen = weakref.ref(cyclic)
    resources.collect_and_freeze()
    del cyclic
    gc.collect()
    assert seen() is not None  # frozen: not collected
    resources.collect_and_freeze()
    assert seen() is None
