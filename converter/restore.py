"""Restores the fp32 checkpoint from an artifact, one tensor in memory at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.manifest import CheckpointEntry
from bf16kit.artifact.publish import explaining_disk_errors, locked_directory
from bf16kit.converter.process.progress import Progress
from bf16kit.converter.write.export import Place, header
from bf16kit.messages.errors import ArtifactError, ArtifactExists, UsageError
from bf16kit.messages.wording import size
from bf16kit.numerics.tensors import BY_NAME


def restore(artifact: Path, out: Path, *, force: bool, progress: Progress) -> str:
    """Write every tensor of the source checkpoint to ``out`` as safetensors; return a one-line summary for the user.

    The file is written beside ``out`` and renamed, so that a reader never sees half a file. Raises
    :class:`ArtifactExists` if ``out`` exists and ``force`` is false, and what opening the artifact raises.
    """
    if out.is_dir():
        raise ArtifactExists(f"{out}: is a directory; --out must be the file to write, such as fp32.safetensors")
    if os.path.lexists(out) and not force:
        raise ArtifactExists(f"{out}: already exists; choose another name, or pass --force to replace it")
    if not out.parent.is_dir():
        raise UsageError(f"{out.parent}: no such directory")
    with progress.step("checking digests"):
        opened = Artifact.open(artifact)
    if not opened.manifest.checkpoint and opened.manifest.source.tensors:
        raise ArtifactError(
            f"{artifact}: keeps no residual, so its checkpoint cannot be restored; convert it without --no-residual"
        )
    entries = sorted(opened.manifest.checkpoint, key=lambda entry: entry.name)
    total = sum(_nbytes(entry) for entry in entries)
    with explaining_disk_errors(out), locked_directory(out) as directory, explaining_disk_errors(out):
        with progress.step("restoring", total) as advance:
            _write(directory / out.name, opened, entries, advance)
        (directory / out.name).replace(out)
    return f"restored {len(entries)} tensors, {size(total)}, to {out}"


def _write(path: Path, opened: Artifact, entries: list[CheckpointEntry], advance: Callable[[int], None]) -> None:
    """Write the tensors of ``entries``, in that order, which is the header's."""
    places, start = [], 0
    for entry in entries:
        places.append(Place(entry.name, entry.dtype, tuple(entry.shape), start))
        start += _nbytes(entry)
    ordered = Artifact(opened.path, opened.manifest.model_copy(update={"checkpoint": entries}))
    with path.open("xb") as file:
        file.write(header(places))
        for _, array in ordered.checkpoint_tensors():
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            advance(array.nbytes)
        file.flush()
        os.fsync(file.fileno())


def _nbytes(entry: CheckpointEntry) -> int:
    return math.prod(entry.shape) * BY_NAME[entry.dtype].numpy.itemsize
