"""A thread that calls one function periodically until it is stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable

from service.config.guard import Guard


class PeriodicThread:
    """Calls ``tick`` every ``seconds``, on a daemon thread called ``name``. Exceptions are logged; it goes on."""

    def __init__(self, name: str, seconds: float, tick: Callable[[], object]) -> None:
        self._seconds = seconds
        self._tick = tick
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, *, wait: bool = True) -> None:
        """End the thread. With ``wait``, a tick that runs is waited for. May be called without :meth:`start`."""
        self._stopped.set()
        if wait and self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        guard = Guard()
        while not self._stopped.wait(self._seconds):
            guard.run(self._thread.name, self._tick)
