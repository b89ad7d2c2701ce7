"""``python -m converter.process.following PARENT COMMAND…``: become COMMAND, which ends when PARENT does.

A conversion outlives a worker of Ray that is killed otherwise, and another begins the same one elsewhere.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Linux kills it with its parent; elsewhere it goes on."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        prctl = getattr(ctypes.CDLL(None), "prctl", None)
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.execv(command[0], command)  # noqa: S606 -- the command line of this program


if __name__ == "__main__":
    main()
