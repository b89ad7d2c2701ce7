"""Files that this process may not read, like those of another user. This also works if the tests run as root."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_NOBODY = 65534


@contextlib.contextmanager
def world_readable_directory() -> Iterator[Path]:
    """Yield a directory that every user may enter (pytest's own are private), and remove it at the end."""
    place = Path(tempfile.mkdtemp())
    place.chmod(0o755)
    try:
        yield place
    finally:
        shutil.rmtree(place)


@contextlib.contextmanager
def unreadable(path: Path) -> Iterator[int]:
    """Make ``path`` unreadable for this process, and yield the process's user id.

    As root, the process becomes another user meanwhile.
    """
    mode, user = path.stat().st_mode, os.geteuid()
    if user != 0:
        path.chmod(0)
        try:
            yield user
        finally:
            path.chmod(mode)
        return
    path.chmod(0o700)
    os.seteuid(_NOBODY)
    try:
        yield _NOBODY
    finally:
        os.seteuid(user)
        path.chmod(mode)
