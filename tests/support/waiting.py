"""Wait for something that another thread or process does: for a condition, never for a fixed time.

Only what must *not* happen takes a fixed time: see :func:`stays`.
"""

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


def stays(condition: Callable[[], object], seconds: float, what: str = "the condition") -> None:
    """Check for ``seconds`` that ``condition()`` stays true. Raise AssertionError as soon as it is not."""
    begun = time.monotonic()
    while (passed := time.monotonic() - begun) < seconds:
        assert condition(), f"{what} was true for {passed:.2f} s of {seconds:g} s"
        time.sleep(0.01)
