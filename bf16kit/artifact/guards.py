"""Checks of an artifact before any of its files is used: names, links, kinds, sizes, and the tensors' positions."""

from __future__ import annotations

import os
from pathlib import Path

from bf16kit.artifact.manifest import MANIFEST, RESIDUAL, FileEntry, Manifest, plain_name
from bf16kit.artifact.reading import damaged_if_unreadable, open_inside
from bf16kit.messages.errors import ArtifactDamaged, ArtifactError
from bf16kit.messages.wording import quoted

# Bytes. With 10,000 tensors, and 40,000 nodes in each of three profiles' plans, a manifest has 35 MiB.
_MAX_MANIFEST = 64 << 20


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the artifact in ``path``.

    Raises :class:`ArtifactError` or a subclass if it is missing or not valid.
    """
    where = path / MANIFEST
    with damaged_if_unreadable(where):
        if not path.is_dir():
            what = "not a directory, as an artifact is" if path.exists() else "no such directory"
            raise ArtifactError(f"{path}: {what}")
        if not where.is_file():
            raise ArtifactError(f"{path}: not an artifact, it has no {MANIFEST}")
        with open_inside(where, ArtifactError) as file:
            data = file.read(_MAX_MANIFEST + 1)
    if len(data) > _MAX_MANIFEST:
        raise ArtifactError(f"{where}: larger than {_MAX_MANIFEST >> 20} MiB, not a manifest")
    return Manifest.loads(data, where)


def check_file(path: Path, name: str, entry: FileEntry) -> None:
    """Check a file before it is read: plain name, present, no link out of the artifact, regular, of the listed size."""
    try:
        plain_name(name)
    except ValueError as error:
        raise ArtifactError(f"{path}: {error}") from None
    with damaged_if_unreadable(path / name), open_inside(path / name, ArtifactError) as file:
        size = os.fstat(file.fileno()).st_size
    if size != entry.bytes:
        raise ArtifactDamaged(
            f"{path / name}: {size} bytes, the manifest says {entry.bytes}; copy or convert the artifact again"
        )


def check_references(manifest: Manifest, path: Path) -> None:
    """Check that the manifest lists every file that it refers to, and that every tensor lies within its file."""
    names = [p.graph for p in manifest.profiles.values()]
    names += [name for export in manifest.exports.values() for name in export.files]
    own = (p.golden for p in manifest.profiles.values())
    names += [n for n in (manifest.reference, manifest.golden, manifest.measurements, *own) if n is not None]
    for name in names:
        if name not in manifest.files:
            raise ArtifactError(f"{path / MANIFEST}: {quoted(name)} is not among its files")
    for tensor in manifest.tensors:
        _check_segment(manifest, path, tensor.name, tensor.file, tensor.offset + tensor.bytes)
        if tensor.residual is not None:
            end = tensor.residual.offset + tensor.residual.bytes
            _check_segment(manifest, path, tensor.name, RESIDUAL, end)


def _check_segment(manifest: Manifest, path: Path, tensor: str, file: str, end: int) -> None:
    if file not in manifest.files:
        raise ArtifactError(
            f"{path / MANIFEST}: tensor {quoted(tensor)} is in {quoted(file)}, which is not among its files"
        )
    if end > manifest.files[file].bytes:
        raise ArtifactError(
            f"{path / MANIFEST}: tensor {quoted(tensor)} ends at byte {end}, beyond the end of {quoted(file)}"
        )
