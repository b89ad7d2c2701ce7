"""What :mod:`bench.conversion.memory` runs in a process of its own: a conversion, or no more than its imports.

``python -m bench.conversion.process run MODULES ARGUMENT …`` is ``bf16-convert ARGUMENT …``, which then writes the
names of all modules it had imported to the file MODULES; ``… import MODULES`` imports them.
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


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(Path(sys.argv[2]), sys.argv[3:])
    else:
        import_all(Path(sys.argv[2]))
