"""``python -m converter.process.following PARENT COMMAND…``: become COMMAND, and end when PARENT does.

Otherwise a conversion would outlive a killed Ray worker, while another node starts the same conversion.
"""

from __future__ import annotations

import os
import sys

from bf16kit.system.orphans import die_with_parent


def main() -> None:
    """Run COMMAND in this process; Linux kills it with its parent, on other systems it continues."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    die_with_parent(parent)
    os.execv(command[0], command)  # noqa: S606 -- the command line of this program


if __name__ == "__main__":
    main()
