"""Wait for something that another thread or process does: for a condition, never for a fixed time."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(
    condition: Callable[[], object], seconds: float = 20.0, what: str | Callable[[], str] = "the condition"
) -> None:
    """Return as soon as ``condition()`` is true. Raise AssertionError after ``seconds``; only failures take so long."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            text = what if isinstance(what, str) else what()  # a function tells the state at the end
            raise AssertionError(f"{text} did not come true within {seconds:g} s")
        time.sleep(0.002)
