"""Runs tasks on a few threads: those of one key in order, those of different keys side by side."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Sequences:
    """At most ``threads`` tasks run at once. A task that does not end holds up only those of its own key."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, name)
        self._lock = threading.Lock()
        self._tasks: dict[str, deque[tuple[Callable[[], None], Future[None]]]] = {}  # those that wait, by key

    def submit(self, key: str, task: Callable[[], None]) -> Future[None]:
        """Return a future that ends as ``task`` does.

        Raises RuntimeError after :meth:`close`, or if the system cannot start a thread.
        """
        future: Future[None] = Future()
        with self._lock:
            waiting = self._tasks.get(key)
            if waiting is None:
                waiting = self._tasks[key] = deque()
                try:
                    self._pool.submit(self._run, key)
                except RuntimeError:
                    del self._tasks[key]
                    raise
            waiting.append((task, future))
        return future

    def close(self) -> None:
        """Accept no further task. Those that were submitted still run."""
        self._pool.shutdown(wait=False)

    def _run(self, key: str) -> None:
        while True:
            with self._lock:
                if not self._tasks.get(key):
                    self._tasks.pop(key, None)
                    return
                task, future = self._tasks[key].popleft()
            try:
                task()
            except BaseException as error:  # noqa: BLE001 -- it belongs to the one who waits
                future.set_exception(error)
            else:
                future.set_result(None)
