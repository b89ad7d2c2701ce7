"""Long texts for other processes of this server: they travel as files, which no limit of messages applies to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def text_file(text: str) -> Iterator[int]:
    """Yield the descriptor of memory that holds ``text``. Raises OSError if no descriptor is left."""
    file = os.memfd_create("bf16kit-text", os.MFD_CLOEXEC)
    try:
        with os.fdopen(file, "wb", closefd=False) as writing:
            writing.write(text.encode())
        yield file
    finally:
        os.close(file)


def read_text(file: int) -> str:
    """Return the text, whatever has been read of the file before."""
    os.lseek(file, 0, os.SEEK_SET)
    with os.fdopen(file, "rb", closefd=False) as reading:
        return reading.read().decode()
