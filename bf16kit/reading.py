"""Reading the files of an artifact, where each may be gone, cut short or unreadable at any moment."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bf16kit.entries import Segment
from bf16kit.errors import ArtifactDamaged


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Whoever reads ``path`` within finds a damaged artifact where it is gone or may not be read."""
    try:
        yield
    except OSError as error:
        raise ArtifactDamaged(f"{path}: missing or unreadable ({error.strerror})") from None


def read_segment(path: Path, segment: Segment, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """The bytes of ``segment``, in ``out`` where that is given. ArtifactDamaged for a file that ends before them."""
    found = np.empty(segment.bytes, np.uint8) if out is None else out
    done = 0
    with readable(path), path.open("rb", buffering=0) as file:
        file.seek(segment.offset)
        while done < segment.bytes and (count := file.readinto(found[done:].data)):
            done += count
    if done < segment.bytes:
        raise ArtifactDamaged(f"{path}: cut short to {segment.offset + done} bytes while it was read")
    return found
