"""Locks between the processes of a test run: most tests run in parallel, a few must run alone."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Turns:
    """A shared and exclusive lock for the processes of one run: any number of tests run together, or one runs alone.

    A test holds the lock ``room``, shared or exclusive, while it runs. It holds the lock ``door`` while it waits for
    ``room``, so that no further test can start before one that waits to run alone.
    """

    def __init__(self, directory: Path) -> None:
        """Open the lock files in ``directory``, which is the same for all processes of the run."""
        self._entry_lock = (directory / "door").open("w")
        self._run_lock = (directory / "room").open("w")

    @contextmanager
    def turn(self, *, alone: bool) -> Iterator[None]:
        fcntl.flock(self._entry_lock, fcntl.LOCK_EX)
        try:
            fcntl.flock(self._run_lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        finally:
            fcntl.flock(self._entry_lock, fcntl.LOCK_UN)
        try:
            yield
        finally:
            # Unlock the file; closing it is not enough, because a process that the test forked would keep the lock.
            fcntl.flock(self._run_lock, fcntl.LOCK_UN)

    def close(self) -> None:
        self._entry_lock.close()
        self._run_lock.close()
