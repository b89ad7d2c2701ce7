"""The demo waits for progress: a busy machine is slow, and no failure."""

from __future__ import annotations

import itertools
import time

import pytest
from running import DemoFailed, wait


def test_a_slow_step_is_waited_for_as_long_as_it_moves() -> None:
    steps = itertools.count()
    begun = time.monotonic()
    assert wait("it", lambda: time.monotonic() - begun > 0.6, lambda: str(next(steps)), patience=0.2)


def test_a_step_that_does_not_move_fails_with_how_far_it_came() -> None:
    with pytest.raises(DemoFailed, match=r"waited for it; nothing has changed for 0 s: 12 are done"):
        wait("it", lambda: None, lambda: "12 are done", patience=0.1)
