"""Renaming a directory into place atomically: a reader sees the old directory or the new one, and nothing between."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

_AT_FDCWD = -100
_NOREPLACE = 1
_EXCHANGE = 2
_NOT_OFFERED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)  # old kernels; file systems that cannot


def rename_new(source: Path, target: Path) -> None:
    """Rename ``source`` to ``target``; FileExistsError when the target exists, even as an empty directory."""
    if _renameat2(source, target, _NOREPLACE):
        return
    if os.path.lexists(target):  # without renameat2, rename would quietly replace an empty directory
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    source.rename(target)


def exchange(source: Path, target: Path, aside: Path) -> Path:
    """Replace the directory ``target`` with the directory ``source``; return the new path of the old one.

    That path is ``source``, or ``aside`` on systems that cannot exchange two names. There the old directory is renamed
    first, ``target`` is missing for a moment, and the old one is renamed back when the second step fails.
    """
    if _renameat2(source, target, _EXCHANGE):
        return source
    target.rename(aside)
    try:
        source.rename(target)
    except OSError:
        aside.rename(target)
        raise
    return aside


def _renameat2(source: Path, target: Path, flags: int) -> bool:
    """Call Linux's renameat2; return False where it is not available."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NOT_OFFERED:
        return False
    raise OSError(code, os.strerror(code), str(source), None, str(target))
