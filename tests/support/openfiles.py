"""A process that may open no further file, as one whose limit has been reached."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_more_files(but: int = 0) -> Iterator[None]:
    """This process may open ``but`` further files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [os.open("/dev/null", os.O_RDONLY) for _ in range(but + 1)]
    for file in free:
        os.close(file)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
