"""What stays is not looked through for garbage again; what has gone is found all the same."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from service.process import garbage


class Cyclic:
    """Refers to itself, so that only a search for garbage frees it."""

    def __init__(self) -> None:
        self.itself: Any = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_what_stays_is_not_looked_at_again() -> None:
    kept = [Cyclic() for _ in range(1000)]
    garbage.settle()
    assert gc.get_freeze_count() >= 1000
    assert not any(found is kept[0] for found in gc.get_objects())


def test_what_has_gone_since_it_was_frozen_is_freed() -> None:
    cyclic = Cyclic()
    seen = weakref.ref(cyclic)
    garbage.settle()
    del cyclic
    gc.collect()
    assert seen() is not None  # frozen: nobody looks
    garbage.settle()
    assert seen() is None
