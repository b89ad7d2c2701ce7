"""Renaming a directory into place in one step, so that a reader sees the old one or the new one and nothing between."""

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
    """Rename ``source`` to ``target``; FileExistsError when something is there, an empty directory included."""
    if _renameat2(source, target, _NOREPLACE):
        return
    if os.path.lexists(target):  # without renameat2, rename would quietly replace an empty directory
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    source.rename(target)


def exchange(source: Path, target: Path, aside: Path) -> Path:
    """Put the directory ``source`` in place of directory ``target``; returns where the old one now is.

    That is ``source`` or, where the system cannot exchange two names, ``aside``: then the old one is renamed first, and
    brought back when the second step fails, and for a moment ``target`` is not there.
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
    """Linux's renameat2; False where it is not offered."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NOT_OFFERED:
        return False
    raise OSError(code, os.strerror(code), str(source), None, str(target))
