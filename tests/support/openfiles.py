"""Bring this process to its limit of open files, of a file's size, or of threads."""

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def no_more_files(but: int = 0) -> Iterator[None]:
    """Let this process open only ``but`` further files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [os.open("/dev/null", os.O_RDONLY) for _ in range(but + 1)]
    for file in free:
        os.close(file)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let this process write no file of more than ``size`` bytes.

    At that size, writing fails with EFBIG, much as it fails with ENOSPC on a full disk, because Python ignores the
    signal SIGXFSZ.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def no_more_threads(named: str = "") -> Iterator[None]:
    """Let this process start no further thread whose name contains ``named``."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if named in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        yield
