"""Waiting for something that another thread or process does: for the condition, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], object], seconds: float = 20.0, what: str = "the condition") -> None:
    """Returns as soon as ``condition()`` is true; AssertionError after ``seconds``, which only a failure takes."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"{what} did not come true within {seconds:g} s")
        time.sleep(0.002)
