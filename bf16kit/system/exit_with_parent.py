"""Ends a process when the one that started it dies.

``python -m bf16kit.system.exit_with_parent PARENT COMMAND…`` becomes COMMAND, and ends with PARENT.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def exit_with_parent(parent: int) -> None:
    """Have the kernel kill this process when ``parent``, which started it, dies; exit at once if it already has.

    Only Linux can do this. Elsewhere a process that reads from its parent notices the end of the channel.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    exit_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606 - the command line of this program
