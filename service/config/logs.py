"""The log: standard error, one event per line, times in UTC, as text or as JSON.

A write to a full pipe blocks for as long as nobody reads it. Lines are therefore written by a thread of their own.
"""

from __future__ import annotations

import io
import json
import logging
import os
import queue
import re
import select
import sys
import threading
import time
from collections.abc import Set
from datetime import UTC, datetime
from typing import Any, Literal

Format = Literal["text", "json"]

#: The fields, given through ``extra``, that are logged beside the message. Other attributes of a record are never
#: written, so a payload or secret attached to a record does not reach the log.
FIELDS = ("model", "version", "request_id", "code", "incident", "trace_id", "worker")
NUMERIC_FIELDS = ("total_s", "queue_s", "compute_s")  # numeric fields, in seconds: numbers in JSON
_LONGEST_FIELD = 256  # characters: clients choose request ids
_MOST_WAITING = 2000  # lines: some 1 MB, seconds of a busy debug log
# A process may be killed or end itself right after an event, so the caller waits for its line to be written: a thousand
# times longer than that takes. After one wait in vain nobody waits until all lines are written.
_WRITE_SECONDS = 0.05
_LAST_WRITE_SECONDS = 1.0  # for waiting lines at the end of the process
# Terminal control characters, and characters that join or reorder text (Unicode's bidirectional controls).
_PLAIN_WORD = re.compile(r"[A-Za-z0-9._:/+-]+")
_CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class TextFormatter(logging.Formatter):
    """A formatter for text: one line per event. Newlines become ``|``, so that no text from outside can forge an event.

    Control characters are written as ``\\x1b``, so that no text can change what a terminal shows. FIELDS and
    NUMERIC_FIELDS follow the message as ``name=value``. A value is quoted as in JSON unless it is one plain word.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
        self.converter = time.gmtime

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 -- the library's name
        named = (f" {name}={_quoted_if_needed(value)}" for name, value in _extra_fields(record).items())
        return super().formatMessage(record) + "".join(named)

    def format(self, record: logging.LogRecord) -> str:
        return _CONTROL.sub(_escaped, " | ".join(super().format(record).splitlines()).replace("\t", " "))


class JsonFormatter(logging.Formatter):
    """A formatter for JSON: one object per line.

    Its keys are ``time``, ``level``, ``logger``, ``message``, ``exception`` if there is one, FIELDS and NUMERIC_FIELDS.
    """

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, str | float] = {
            "time": datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info and record.exc_info[0] is not None:
            event["exception"] = self.formatException(record.exc_info)
        event |= _extra_fields(record)
        # ASCII only, so that no character can end the line. Lone surrogates are escaped: not every reader accepts them.
        return json.dumps({key: _unicode(value) if isinstance(value, str) else value for key, value in event.items()})


FORMATS: dict[Format, type[logging.Formatter]] = {"text": TextFormatter, "json": JsonFormatter}


class LogWriter(logging.Handler):
    """A handler that never blocks for long: at most :data:`_WRITE_SECONDS` once, until all lines are written again.

    Lines wait in a queue of limited size. What finds no room, or is not taken by ``target``, is dropped and counted,
    and the log says how many as soon as lines get through again. :meth:`flush` waits for the waiting lines, up to
    :data:`_LAST_WRITE_SECONDS`.
    """

    def __init__(self, target: io.RawIOBase) -> None:
        """``target`` is unbuffered: a blocked write to a buffered file would hold a lock that Python's end needs."""
        super().__init__()
        self._target = target
        # Neither blocks a thread that logs while it logs, as a finalizer may that runs within emit.
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._accepted = self._dropped = 0  # lines; changed under the lock that Handler holds around emit
        self._written = 0  # lines; changed by the thread
        self._late = False  # a wait for a line was in vain, and lines are still waiting
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        waiting = self._accepted - self._written
        if waiting >= _MOST_WAITING:
            self._dropped += 1
            return
        try:
            line = f"{self.format(record)}\n"
        except Exception as error:  # noqa: BLE001 -- logging's own way would write to standard error, and may block
            line = f"an event of {record.name} cannot be logged: {type(error).__name__}: {error}\n"
        self._late = self._late and waiting > 0
        self._accepted += 1
        self._lines.put(line)
        # A debug log has lines for each request, which would wait for the thread to wake.
        if record.levelno > logging.DEBUG and not self._late:
            self._late = not self._wait_written(_WRITE_SECONDS)

    def flush(self) -> None:
        self._wait_written(_LAST_WRITE_SECONDS)

    def _wait_written(self, seconds: float) -> bool:
        last = self._accepted
        with self._changed:
            return self._changed.wait_for(lambda: self._written >= last, seconds)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        refused = 0  # lines that the target did not take
        told = 0  # lost lines that the log has told of
        while True:
            refused += not self._write(self._lines.get())
            lost = refused + self._dropped - told
            if lost and self._lines.empty() and self._write(self._note(lost)):
                told += lost
            with self._changed:
                self._written += 1
                self._changed.notify_all()

    def _write(self, line: str) -> bool:
        """Write a line. Return False if the target takes none: its reader is gone, or its disk is full."""
        data = line.encode("utf-8", "backslashreplace")
        try:
            while data:
                written = self._target.write(data)
                if written is None:  # another program has made the file non-blocking
                    poll = select.poll()
                    poll.register(self._target, select.POLLOUT)
                    poll.poll()
                else:
                    data = data[written:]
        except (OSError, ValueError):  # ValueError: it is closed
            return False
        return True

    def _note(self, lost: int) -> str:
        text = "%d log lines before this one are lost: standard error was full, or its reader was gone"
        record = logging.getLogRecordFactory()(__name__, logging.WARNING, __file__, 0, text, (lost,), None)
        return f"{self.format(record)}\n"


def configure(level: str, kind: Format = "text", worker: int | None = None) -> None:
    """Log everything from ``level`` (a name) up to standard error. ``worker`` is added to every event.

    Python's warnings are logged as well: written directly, they would block a thread while nobody reads standard error.
    """
    handler = _standard_error()
    if worker is not None:
        _add_worker_to_records(worker)
    handler.setFormatter(FORMATS[kind]())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    silence_grpc()


def _standard_error() -> logging.Handler:
    if sys.stderr is None:  # it was closed at the start; its descriptor may belong to another file now
        return logging.NullHandler()
    sys.stderr.flush()  # what the log writes does not pass through its buffer
    file: Any = sys.stderr.buffer
    return LogWriter(getattr(file, "raw", file))


def adjust(levels: Set[int], kind: Format) -> None:
    """Change the settings of :func:`configure`: from now on log only events of these levels, in this format.

    Levels above ERROR are logged with ERROR.
    """
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, TextFormatter | JsonFormatter):
            handler.setFormatter(FORMATS[kind]())
            handler.filters[:] = [lambda record: min(record.levelno, logging.ERROR) in levels]
    logging.getLogger().setLevel(min(levels, default=logging.CRITICAL + 1))


def _add_worker_to_records(worker: int) -> None:
    original = logging.getLogRecordFactory()

    def make(*arguments: Any, **named: Any) -> logging.LogRecord:
        record = original(*arguments, **named)
        record.worker = worker
        return record

    logging.setLogRecordFactory(make)


def silence_grpc() -> None:
    """Stop gRPC from logging what its peers send: they could fill the log.

    Its C library writes the peers' bytes to standard error; setting ``GRPC_VERBOSITY`` in the environment turns that on
    again. grpcio logs a traceback for every path that is not UTF-8, which no real client sends. Call it before gRPC is
    used.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_no_encoding)


def _is_no_encoding(record: logging.LogRecord) -> bool:
    return record.msg != "Invalid encoding on %s"


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")


def _extra_fields(record: logging.LogRecord) -> dict[str, str | float]:
    """Return the FIELDS and NUMERIC_FIELDS of the event, cut to a limited length."""
    given = vars(record)
    fields = {name: str(given[name])[:_LONGEST_FIELD] for name in FIELDS if given.get(name) is not None}
    return fields | {name: round(float(given[name]), 6) for name in NUMERIC_FIELDS if given.get(name) is not None}


def _quoted_if_needed(value: str | float) -> str:
    return value if isinstance(value, str) and _PLAIN_WORD.fullmatch(value) else json.dumps(value)


def _unicode(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
