"""Tests that run side by side in several processes, and the few that nothing else may run beside."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Turns:
    """Whose turn it is among the processes of one run: any number of tests together, or one that is alone.

    The room is held shared, or alone; whoever waits to be alone keeps the door, so that nobody new enters meanwhile.
    """

    def __init__(self, directory: Path) -> None:
        """``directory`` is the run's own; all of its processes are given the same."""
        self._door = (directory / "door").open("w")
        self._room = (directory / "room").open("w")

    @contextmanager
    def turn(self, *, alone: bool) -> Iterator[None]:
        fcntl.flock(self._door, fcntl.LOCK_EX)
        try:
            fcntl.flock(self._room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        finally:
            fcntl.flock(self._door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            # Unlocked, not closed: a process that a test has forked would otherwise hold on to it.
            fcntl.flock(self._room, fcntl.LOCK_UN)

    def close(self) -> None:
        self._door.close()
        self._room.close()
