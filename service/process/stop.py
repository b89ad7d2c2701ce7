"""How a server starts and ends: whom it tells, and the signal to stop, set from anywhere, handlers included."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable
from typing import NamedTuple

Started = Callable[[int, int], None]  # told the gRPC port and the HTTP port


class Ending(NamedTuple):
    """How the server ended."""

    answered: bool  # every request that was accepted
    freed: bool  # every thread: none is still loading or running a model


class Stop:
    """Like :class:`threading.Event`, but safe to set from a signal handler.

    An Event's lock may be held by the very code the handler interrupts; a byte in a pipe needs no lock.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._on_signals = False

    def set(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full of earlier requests to stop
            os.write(self._writer, b"x")

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until set (True) or until ``timeout`` seconds have passed (False)."""
        readable, _, _ = select.select([self._reader], [], [], timeout)
        return bool(readable)

    def close(self) -> None:
        if self._on_signals:
            signal.set_wakeup_fd(-1)
        os.close(self._reader)
        os.close(self._writer)

    def on_signals(self) -> None:
        """Set on SIGTERM or SIGINT; the second one kills at once, for a drain that someone will not wait for.

        The kernel may give the signal to any thread, and Python runs handlers on the main one, which may wait in
        :meth:`wait` for good: so Python's C handler writes to the pipe itself.
        """

        def handle(number: int, _: object) -> None:
            signal.signal(number, signal.SIG_DFL)
            self.set()

        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._on_signals = True
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, handle)
