"""Files that this process may not read, as those of another user are: also where tests are root, who may read all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_NOBODY = 65534


@contextlib.contextmanager
def open_place() -> Iterator[Path]:
    """A directory that every user may enter, as pytest's own are not; removed at the end."""
    place = Path(tempfile.mkdtemp())
    place.chmod(0o755)
    try:
        yield place
    finally:
        shutil.rmtree(place)


@contextlib.contextmanager
def closed(path: Path) -> Iterator[int]:
    """``path`` is its owner's alone, and this process another user meanwhile: its number."""
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
