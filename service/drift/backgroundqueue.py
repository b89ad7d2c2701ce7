"""A work queue with one thread, which starts with the first item: for work beside the threads that answer requests."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class BackgroundQueue(Generic[_Item]):
    """A queue whose thread calls ``work`` with the waiting items, in order, at most ``max_batch`` of them at a time.

    ``work`` should not raise. At most ``max_waiting`` items may wait. Items that arrive within ``gather_s`` seconds of
    the first are handed over together with it. ``on_start`` runs on the thread before anything else.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Sequence[_Item]], None],
        *,
        max_waiting: int | None = None,
        max_batch: int | None = None,
        gather_s: float = 0.0,
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._work = work
        self._max_waiting = max_waiting
        self._max_batch = max_batch
        self._gather_s = gather_s
        self._on_start = on_start
        self._items: list[_Item] = []
        self._wake = threading.Condition()
        self._ended = False
        self._thread: threading.Thread | None = None

    @property
    def ended(self) -> bool:
        return self._ended

    def put(self, item: _Item) -> bool:
        """Queue an item. Return False if the queue is full or ended.

        Raises RuntimeError if the system cannot start the thread for the first item.
        """
        with self._wake:
            if self._ended or (self._max_waiting is not None and len(self._items) >= self._max_waiting):
                return False
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread  # not before: a thread that was not started cannot be joined
            if not self._items:  # the thread waits for the first item only
                self._wake.notify()
            self._items.append(item)
            return True

    def end(self) -> list[_Item]:
        """Start no further work, and return the items that still wait. Does not wait for work in progress."""
        with self._wake:
            self._ended = True
            self._wake.notify()
            waiting, self._items = self._items, []
        return waiting

    def join(self, deadline: float = math.inf) -> bool:
        """Wait for work in progress, after :meth:`end`. Return False if it still runs at ``deadline``.

        ``deadline`` is in :func:`time.monotonic` seconds. A call on the thread itself returns True at once.
        """
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
        return not thread.is_alive()

    def _run(self) -> None:
        self._on_start()
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._items or self._ended)
                if self._gather_s:
                    self._wake.wait_for(lambda: self._ended, self._gather_s)
                if self._ended:
                    return
                batch = self._items[: self._max_batch]
                del self._items[: self._max_batch]
            self._work(batch)
