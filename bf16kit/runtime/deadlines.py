"""Deadlines of runs, all watched by one thread: a thread per run would cost more than a small run takes."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator


class _Deadline:
    """The deadline of one run, compared by identity."""

    __slots__ = ("at", "on_expiry")

    def __init__(self, at: float, on_expiry: Callable[[], None]) -> None:
        self.at = at
        self.on_expiry = on_expiry


class Deadlines:
    """Watches deadlines; thread-safe. Its thread starts with the first deadline and stays.

    Few runs are active at a time, and most end long before their deadline. So the thread looks for the earliest when it
    wakes, and a run that starts or ends wakes it only when its deadline is earlier than the one it waits for.
    """

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._waiting: set[_Deadline] = set()
        self._wakes_at = -math.inf  # when the thread wakes; -inf while it is about to look
        self._running = False

    @contextlib.contextmanager
    def after(self, seconds: float, on_expiry: Callable[[], None]) -> Iterator[None]:
        """Call ``on_expiry``, on the thread, unless the block ends within ``seconds``; it must neither block nor raise.

        It may still be called while the block ends. Raises RuntimeError when the system cannot start another thread.
        """
        deadline = _Deadline(time.monotonic() + seconds, on_expiry)
        with self._wake:
            if not self._running:
                threading.Thread(target=self._watch, name="deadlines", daemon=True).start()
                self._running = True
            elif deadline.at < self._wakes_at:
                self._wake.notify()
            self._waiting.add(deadline)
        try:
            yield
        finally:
            with self._wake:
                self._waiting.discard(deadline)

    def _watch(self) -> None:
        while True:
            with self._wake:
                now = time.monotonic()
                late = [each for each in self._waiting if each.at <= now]
                self._waiting.difference_update(late)
                self._wakes_at = min((each.at for each in self._waiting), default=math.inf)
                if not late:
                    self._wake.wait(min(self._wakes_at - now, threading.TIMEOUT_MAX))
            for each in late:
                each.on_expiry()


#: One per process: a caller never has to see the deadlines of others.
DEADLINES = Deadlines()
