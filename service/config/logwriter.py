"""Writes log lines on a thread of its own, so that standard error that nobody reads blocks nothing else.

A write to a full pipe blocks for as long as nobody reads it. Lines therefore wait in a queue of limited size. What
finds no room is dropped and counted, and the log says how many as soon as lines get through again.
"""

from __future__ import annotations

import logging
import select
import threading
from typing import Protocol

_MOST_WAITING = 1 << 20  # characters: several thousand lines, seconds of a busy debug log
# A process may be killed or end itself right after an event, so that the caller waits for its line to be written: a
# thousand times longer than that takes. After one wait in vain nobody waits until all lines are written.
_WRITE_SECONDS = 0.05
_LAST_WRITE_SECONDS = 1.0  # for waiting lines at the end of the process


class Target(Protocol):
    """An unbuffered binary file. A blocked write to a buffered one would hold a lock that Python's end needs."""

    def fileno(self) -> int: ...
    def write(self, data: bytes, /) -> int | None: ...


class LogWriter(logging.Handler):
    """A handler that never blocks for long: at most :data:`_WRITE_SECONDS` once, until all lines are written again.

    :meth:`flush` waits for the waiting lines, up to :data:`_LAST_WRITE_SECONDS`. After :meth:`close` the thread ends;
    a later event starts another.
    """

    def __init__(self, target: Target) -> None:
        super().__init__()
        self._target = target
        self._changed = threading.Condition()
        self._lines: list[str] = []
        self._waiting = 0  # characters in them
        self._accepted = self._written = 0  # lines
        self._dropped = 0
        self._late = False  # a wait for a line was in vain, and there are still lines to write
        self._closed = False
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        with self._changed:
            if self._waiting >= _MOST_WAITING:
                self._dropped += 1
                return
        try:
            line = f"{self.format(record)}\n"
        except Exception as error:  # noqa: BLE001 -- logging's own way would write to standard error, and may block
            line = f"an event of {record.name} cannot be logged: {type(error).__name__}: {error}\n"
        with self._changed:
            self._lines.append(line)
            self._waiting += len(line)
            self._accepted += 1
            self._start_thread()
            self._changed.notify_all()
            # A debug log has lines for each request, which would wait for the thread to wake.
            if record.levelno > logging.DEBUG and not self._late:
                self._late = not self._wait_written(_WRITE_SECONDS)

    def flush(self) -> None:
        with self._changed:
            self._wait_written(_LAST_WRITE_SECONDS)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        super().close()

    def _wait_written(self, seconds: float) -> bool:
        last = self._accepted
        return self._changed.wait_for(lambda: self._written >= last, seconds)

    def _start_thread(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="log", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has no thread left: the next event tries again
                return
            self._thread, self._closed = thread, False

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        lost = 0
        while True:
            with self._changed:
                if not self._lines:
                    self._late = False
                self._changed.wait_for(lambda: self._lines or self._closed)
                if not self._lines:
                    self._thread = None
                    return
                lines, self._lines, self._waiting = self._lines, [], 0
                lost, self._dropped = lost + self._dropped, 0  # they came after these lines
            lost += sum(not self._write(line) for line in lines)
            if lost and self._write(self._note(lost)):
                lost = 0
            with self._changed:
                self._written += len(lines)
                self._changed.notify_all()

    def _write(self, line: str) -> bool:
        """Write a line. Return False if the target takes none: its reader is gone, or its disk is full."""
        data = line.encode("utf-8", "backslashreplace")
        try:
            while data:
                written = self._target.write(data)
                if written is None:  # another program has made the file non-blocking
                    self._wait_writable()
                else:
                    data = data[written:]
        except (OSError, ValueError):  # ValueError: it is closed
            return False
        return True

    def _wait_writable(self) -> None:
        poll = select.poll()
        poll.register(self._target, select.POLLOUT)
        poll.poll()

    def _note(self, lost: int) -> str:
        text = "%d log lines before this one are lost: standard error was full, or its reader was gone"
        record = logging.getLogRecordFactory()(__name__, logging.WARNING, __file__, 0, text, (lost,), None)
        return f"{self.format(record)}\n"
