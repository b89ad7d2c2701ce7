"""Let a test configure the process' log, and restore the log afterwards."""

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from bf16kit.service.config import logs


@contextmanager
def restored_log() -> Iterator[None]:
    """Undo all changes to the log's configuration at the end of the block."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        logging.captureWarnings(False)


@contextmanager
def own_log(level: str, kind: logs.Format) -> Iterator[io.StringIO]:
    """Configure the log as ``bf16-serve`` does, and yield a stream with its output."""
    with restored_log():
        logs.configure(level, kind)
        root = logging.getLogger()
        stream = io.StringIO()
        handler = logging.StreamHandler(stream)
        handler.setFormatter(root.handlers[0].formatter)
        root.handlers[:] = [handler]
        yield stream
