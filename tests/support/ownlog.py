"""The process' log, configured by a test and put back after it."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from service.process import logs


@contextmanager
def restored_log() -> Iterator[None]:
    """What is done to the log inside is undone."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


@contextmanager
def own_log(level: str, kind: logs.Format) -> Iterator[io.StringIO]:
    """The log as ``bf16-serve`` configures it, and what it writes."""
    with restored_log():
        logs.configure(level, kind)
        (handler,) = logging.getLogger().handlers
        assert isinstance(handler, logging.StreamHandler)
        stream = io.StringIO()
        handler.setStream(stream)
        yield stream
