"""Reading files that may be missing, truncated, unreadable or far too large: an artifact's files, and a user's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bf16kit.entries import Segment
from bf16kit.errors import ArtifactDamaged, Bf16kitError
from bf16kit.wording import os_error_text


@contextlib.contextmanager
def damaged_if_unreadable(path: Path) -> Iterator[None]:
    """Turn an OSError within the block into ArtifactDamaged: ``path`` is missing or may not be read."""
    try:
        yield
    except OSError as error:
        raise ArtifactDamaged(f"{path}: missing or unreadable ({os_error_text(error)})") from None


def read_segment(path: Path, segment: Segment, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """Read the bytes of ``segment``, into ``out`` when given. ArtifactDamaged if the file ends before them."""
    found = np.empty(segment.bytes, np.uint8) if out is None else out
    done = 0
    with damaged_if_unreadable(path), path.open("rb", buffering=0) as file:
        file.seek(segment.offset)
        while done < segment.bytes and (count := file.readinto(found[done:].data)):
            done += count
    if done < segment.bytes:
        raise ArtifactDamaged(f"{path}: truncated to {segment.offset + done} bytes while it was read")
    return found


def read_bounded(path: Path, most: int, error: type[Bf16kitError], why: str, *, where: str = "") -> bytes:
    """Read the whole file at ``path``, of at most ``most`` bytes; never more, whatever size it claims.

    Raises ``error``, which begins with ``where`` (by default the path), when the file cannot be read, and with ``why``
    when it is larger.
    """
    where = where or str(path)
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as failure:
        raise error(f"{where}: cannot be read: {os_error_text(failure)}") from None
    if len(data) > most:
        raise error(f"{where}: larger than {most >> 20} MiB, {why}")
    return data
