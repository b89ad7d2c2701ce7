"""Signals that a server's processes leave to the one that leads."""

from __future__ import annotations

import signal


def leave_signals_to_the_parent() -> None:
    """Ctrl-C and systemd tell every process of a server to stop; the parent is told as well, and leads."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
