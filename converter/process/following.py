"""``python -m converter.process.following PARENT COMMAND…``: become COMMAND, which ends when PARENT does.

A conversion outlives a worker of Ray that is killed otherwise, and another begins the same one elsewhere.
"""

from __future__ import annotations

import os
import sys

from bf16kit.orphans import end_with


def main() -> None:
    """Linux kills it with its parent; elsewhere it goes on."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    end_with(parent)
    os.execv(command[0], command)  # noqa: S606 -- the command line of this program


if __name__ == "__main__":
    main()
