"""A thread that is there once there is something to do, and what waits for it: to measure beside those who answer."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class LateThread(Generic[_Item]):
    """``work`` is given what waits, first come first, ``at_once`` of it at most; it should not raise.

    ``most`` may wait. What comes within ``gather_s`` of the first goes along with it. ``begin`` is called on the thread
    before anything else.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Sequence[_Item]], None],
        *,
        most: int | None = None,
        at_once: int | None = None,
        gather_s: float = 0.0,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._work = work
        self._most = most
        self._at_once = at_once
        self._gather_s = gather_s
        self._begin = begin
        self._items: list[_Item] = []
        self._wake = threading.Condition()
        self._ended = False
        self._thread: threading.Thread | None = None

    @property
    def ended(self) -> bool:
        return self._ended

    def put(self, item: _Item) -> bool:
        """Have it done; False where there is no room, or nothing is begun any more. Raises RuntimeError where the
        system has no thread left for the first."""
        with self._wake:
            if self._ended or (self._most is not None and len(self._items) >= self._most):
                return False
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread  # no sooner: what was not started cannot be joined
            if not self._items:  # the thread waits for the first, and for no other
                self._wake.notify()
            self._items.append(item)
            return True

    def end(self) -> list[_Item]:
        """Begin nothing any more, and return what still waits. Does not wait for what is at work."""
        with self._wake:
            self._ended = True
            self._wake.notify()
            left, self._items = self._items, []
        return left

    def join(self, deadline: float = math.inf) -> bool:
        """Wait for what is at work, after :meth:`end`. False when it still is at ``deadline``, in
        :func:`time.monotonic` seconds. Nothing to wait for on the thread itself."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
        return not thread.is_alive()

    def _run(self) -> None:
        self._begin()
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._items or self._ended)
                if self._gather_s:
                    self._wake.wait_for(lambda: self._ended, self._gather_s)
                if self._ended:
                    return
                taken = self._items[: self._at_once]
                del self._items[: self._at_once]
            self._work(taken)
