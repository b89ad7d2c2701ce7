"""Start and end of a server: the callback when it listens, how it ended, and the stop signal."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable
from typing import NamedTuple

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
        """Set on SIGTERM or SIGINT; a second signal kills the process at once, without a drain.

        The kernel may deliver the signal to any thread. Python runs handlers on the main thread, which may block in
        :meth:`wait`. So Python's C handler writes to the pipe itself.
        """

        def handle(number: int, _: object) -> None:
            signal.signal(number, signal.SIG_DFL)
            self.set()

        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._on_signals = True
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, handle)
