"""The largest resident memory of one process, measured inside it: what :mod:`bench.conversion_memory` starts.

``python -m bench.peak run MODULES ARGUMENT …`` runs ``bf16-convert ARGUMENT …`` in this process and writes the names of
all modules it had then imported to the file MODULES; ``python -m bench.peak import MODULES`` imports them and does no
more. Both write the peak in bytes as the last line of their standard output.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path


def run(modules: Path, arguments: list[str]) -> None:
    """Convert, and note which modules that took, in the order of their import."""
    from converter.cli import main

    sys.argv = ["bf16-convert", *arguments]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
    modules.write_text("\n".join(sys.modules), "utf-8")


def import_all(modules: Path) -> None:
    """Import what a conversion imports; modules that libraries make up as they run cannot be, and are passed over."""
    for name in modules.read_text("utf-8").split():
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def peak_bytes() -> int:
    """VmHWM of this process. Not ``ru_maxrss``, which a process inherits from the one that started it."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(Path(sys.argv[2]), sys.argv[3:])
    else:
        import_all(Path(sys.argv[2]))
    print(peak_bytes())
