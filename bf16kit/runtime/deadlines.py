"""Deadlines of runs, all watched by one thread: a thread per run would cost more than a small run takes."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator

_LINGER_S = 10.0  # how long the thread stays without deadlines, because runs come one after another


class _Deadline:
    """The deadline of one run, compared by identity."""

    __slots__ = ("at", "on_expiry")

    def __init__(self, at: float, on_expiry: Callable[[], None]) -> None:
        self.at = at
        self.on_expiry = on_expiry


class Deadlines:
    """Watches deadlines; thread-safe. Its thread starts with the first deadline and ends after a while without any.

    Few runs are active at a time, and most end long before their deadline. So the thread looks for the earliest when it
    wakes, and a run that starts or ends wakes it only when its deadline is earlier than the one it waits for.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, linger_s: float = _LINGER_S) -> None:
        """``clock`` returns seconds."""
        self._clock = clock
        self._linger_s = linger_s
        self._wake = threading.Condition()
        self._waiting: set[_Deadline] = set()
        self._wakes_at = -math.inf  # when the thread wakes; -inf without a thread
        self._running = False

    @contextlib.contextmanager
    def after(self, seconds: float, on_expiry: Callable[[], None]) -> Iterator[None]:
        """Call ``on_expiry``, on the thread, unless the block ends within ``seconds``; it must neither block nor raise.

        It may still be called while the block ends. Raises RuntimeError when the system cannot start another thread.
        """
        deadline = _Deadline(self._clock() + seconds, on_expiry)
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
        idle_since = math.inf
        while True:
            with self._wake:
                now = self._clock()
                late = [each for each in self._waiting if each.at <= now]
                self._waiting.difference_update(late)
                idle_since = now if self._waiting or late else min(idle_since, now)
                first = min((each.at for each in self._waiting), default=idle_since + self._linger_s)
                if not self._waiting and not late and now >= first:
                    self._running = False
                    return
                self._wakes_at = first
                if not late:
                    self._wake.wait(min(first - now, threading.TIMEOUT_MAX))
            for each in late:
                each.on_expiry()


#: One per process: a caller never has to see the deadlines of others.
DEADLINES = Deadlines()
