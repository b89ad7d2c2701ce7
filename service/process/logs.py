"""The log: standard error, one line per event, times in UTC."""

from __future__ import annotations

import logging
import sys
import time


class OneLine(logging.Formatter):
    """Newlines become ``|``: a traceback stays one event, and no text from outside can forge a second one."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        return " | ".join(super().format(record).splitlines())


def configure(level: str) -> None:
    """Send everything from ``level`` (a name) up to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
