"""Stop signals are handled by the process that leads the others."""

from __future__ import annotations

import signal


def leave_signals_to_the_parent() -> None:
    """Ignore SIGTERM and SIGINT. Ctrl-C and systemd signal every process of a server; the parent stops the others."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
