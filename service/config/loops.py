"""What ends a server, and work that is repeated until then."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

_log = logging.getLogger(__name__)
_QUIET_SECONDS = 60.0  # between two log entries of the same error of the same step
OnStarted = Callable[[int, int], None]  # called with the gRPC port and the HTTP port


class Ending(NamedTuple):
    """How the server ended."""

    completed: bool  # every accepted request got its response
    threads_ended: bool  # no thread is still loading or running a model


class Stop:
    """Like :class:`threading.Event`, but safe to set from a signal handler.

    The code that the handler interrupts may hold an Event's lock; writing a byte to a pipe needs no lock.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._on_signals = False

    def set(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full of earlier calls
            os.write(self._writer, b"x")

    def wait(self, timeout: float | None = None) -> bool:
        """Block until set (True) or until ``timeout`` seconds have passed (False)."""
        readable, _, _ = select.select([self._reader], [], [], timeout)
        return bool(readable)

    def close(self) -> None:
        if self._on_signals:
            signal.set_wakeup_fd(-1)
        os.close(self._reader)
        os.close(self._writer)

    def on_signals(self) -> None:
        """Set on SIGTERM, SIGINT or SIGHUP; a second SIGTERM or SIGINT kills the process at once, without a drain.

        A second SIGHUP is ignored: when a terminal closes, its shell sends one and the system another. The first is
        ignored where it already is, as under nohup.

        The kernel may deliver the signal to any thread. Python runs handlers on the main thread, which may block in
        :meth:`wait`. So Python's C handler writes to the pipe itself.
        """

        def handle(number: int, _: object) -> None:
            signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else signal.SIG_DFL)
            self.set()

        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._on_signals = True
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, handle)


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
