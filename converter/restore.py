"""Restores the fp32 checkpoint from an artifact, one tensor in memory at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import CheckpointEntry
from bf16kit.messages.errors import ArtifactError, ArtifactExists, UsageError
from bf16kit.messages.wording import size
from bf16kit.numerics.tensors import BY_NAME
from converter.process.progress import Progress
from converter.source import Array
from converter.write.export import Place, header


def restore(artifact: Path, out: Path, *, force: bool, progress: Progress) -> str:
    """Write every tensor of the source checkpoint to ``out`` as safetensors; return a one-line summary for the user.

    The file is written beside ``out`` and renamed, so that a reader never sees half a file. Raises
    :class:`ArtifactExists` if ``out`` exists and ``force`` is false, and what opening the artifact raises.
    """
    _check_target(out, force)
    with progress.step("checking digests"):
        opened = Artifact.open(artifact)
    if not opened.manifest.checkpoint and opened.manifest.source.tensors:
        raise ArtifactError(
            f"{artifact}: keeps no residual, so its checkpoint cannot be restored; convert it without --no-residual"
        )
    entries = sorted(opened.manifest.checkpoint, key=lambda entry: entry.name)
    total = sum(_nbytes(entry) for entry in entries)
    try:
        with _temporary_file(out) as file:
            _write(file, opened, entries, total, progress)
            Path(file.name).replace(out)
    except OSError as error:
        raise _write_error(out, error) from error
    return f"restored {len(entries)} tensors, {size(total)}, to {out}"


def _check_target(out: Path, force: bool) -> None:
    if out.is_dir():
        raise ArtifactExists(f"{out}: is a directory; --out must be the file to write, such as fp32.safetensors")
    if os.path.lexists(out) and not force:
        raise ArtifactExists(f"{out}: already exists; choose another name, or pass --force to replace it")
    if not out.parent.is_dir():
        raise UsageError(f"{out.parent}: no such directory")


@contextlib.contextmanager
def _temporary_file(out: Path) -> Iterator[BinaryIO]:
    """Open a new file beside ``out``, and remove it at the end unless it was renamed.

    The file stays locked until its process ends, however it ends. So an unlocked file was left by a killed run: those
    are removed first.
    """
    prefix = f".{out.name}.tmp-"
    for path in out.parent.iterdir():
        if path.name.startswith(prefix) and path.is_file():
            with contextlib.suppress(OSError), path.open("rb") as left:
                fcntl.flock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
    while True:
        partial = out.with_name(f"{prefix}{os.getpid()}-{secrets.token_hex(4)}")
        try:
            with partial.open("xb") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                if partial.exists():  # else another run took it for a dead one's before it was locked
                    yield file
                    return
        finally:
            partial.unlink(missing_ok=True)


def _write(
    file: BinaryIO, opened: Artifact, entries: Sequence[CheckpointEntry], total: int, progress: Progress
) -> None:
    with progress.step("restoring", total) as advance:
        file.write(_header(entries))
        for array in _in_order(opened, entries):
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            advance(array.nbytes)
        file.flush()
        os.fsync(file.fileno())


def _write_error(out: Path, error: OSError) -> UsageError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = shutil.disk_usage(out.parent).free >> 20
        return UsageError(f"{out}: disk full ({free} MiB free), nothing was written; free some space")
    return UsageError(f"{out}: cannot be written ({error.strerror})")


def _header(entries: Sequence[CheckpointEntry]) -> bytes:
    """The safetensors header, in the order of ``entries``."""
    places, start = [], 0
    for entry in entries:
        places.append(Place(entry.name, entry.dtype, tuple(entry.shape), start))
        start += _nbytes(entry)
    return header(places)


def _in_order(opened: Artifact, entries: Sequence[CheckpointEntry]) -> Iterator[Array]:
    """Yield the restored tensors in the order that the header promises: by name."""
    ordered = Artifact(opened.path, opened.manifest.model_copy(update={"checkpoint": list(entries)}))
    for entry, (name, array) in zip(entries, ordered.checkpoint_tensors(), strict=True):
        if name != entry.name or list(array.shape) != entry.shape or array.nbytes != _nbytes(entry):
            raise UsageError(f"tensor {name!r}: restored as {array.dtype}{list(array.shape)}, not as {entry.dtype}")
        yield array


def _nbytes(entry: CheckpointEntry) -> int:
    return math.prod(entry.shape) * BY_NAME[entry.dtype].numpy.itemsize
