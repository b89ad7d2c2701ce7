"""Work that is repeated until it is stopped, whatever it raises: nothing restarts the thread that does it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)
_QUIET_SECONDS = 60.0  # between two log entries of the same error of the same step


class Guard:
    """Logs what a step raises, with its traceback, instead of letting the loop end. For one thread.

    An error that comes again at once is logged once a minute.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged: dict[str, tuple[str, float]] = {}  # by step: its last error in the log, and when

    def run(self, name: str, step: Callable[[], object]) -> None:
        """Run ``step``, called ``name`` in the log."""
        try:
            step()
        except Exception as error:  # noqa: BLE001 -- the other steps, and the next round, must run
            text, now = repr(error), self._clock()
            before, at = self._logged.get(name, ("", 0.0))
            if text != before or now - at >= _QUIET_SECONDS:
                self._logged[name] = text, now
                _log.exception("%s failed; it will run again", name)


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
