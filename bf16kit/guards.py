"""Checks of an artifact before any of its files is used: names, links, kinds, sizes, and the tensors' positions."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from bf16kit.errors import ArtifactDamaged, ArtifactError
from bf16kit.manifest import MANIFEST, RESIDUAL, FileEntry, Manifest, plain_name
from bf16kit.reading import damaged_if_unreadable

_MAX_MANIFEST = 256 << 20  # bytes; a manifest of a very large model is a few MB


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
        _check_inside(path, MANIFEST)
        with where.open("rb") as file:
            data = file.read(_MAX_MANIFEST + 1)
    if len(data) > _MAX_MANIFEST:
        raise ArtifactError(f"{where}: larger than {_MAX_MANIFEST >> 20} MiB, not a manifest")
    return Manifest.loads(data, where)


def check_file(path: Path, name: str, entry: FileEntry) -> None:
    """Check a file before it is read: plain name, present, no link out of the artifact, regular, of the listed size."""
    with damaged_if_unreadable(path / name):
        _check_inside(path, name)
        found = (path / name).stat()
    if not stat.S_ISREG(found.st_mode):
        raise ArtifactError(f"{path / name}: not a regular file")
    if found.st_size != entry.bytes:
        raise ArtifactDamaged(
            f"{path / name}: {found.st_size} bytes, the manifest says {entry.bytes}; copy or convert the artifact again"
        )


def _check_inside(path: Path, name: str) -> None:
    """Raise ArtifactError if ``name`` is not plain, or links out of the directory.

    A link to another name in the same directory is allowed: a Kubernetes volume has such links.
    """
    try:
        plain_name(name)
    except ValueError as error:
        raise ArtifactError(f"{path}: {error}") from None
    if (path / name).is_symlink() and not Path(os.path.realpath(path / name)).is_relative_to(os.path.realpath(path)):
        raise ArtifactError(f"{path / name}: a link out of the artifact")


def check_references(manifest: Manifest, path: Path) -> None:
    """Check that the manifest lists every file that it refers to, and that every tensor lies within its file."""
    names = [p.graph for p in manifest.profiles.values()]
    names += [name for export in manifest.exports.values() for name in export.files]
    own = (p.golden for p in manifest.profiles.values())
    names += [n for n in (manifest.reference, manifest.golden, manifest.measurements, *own) if n is not None]
    for name in names:
        if name not in manifest.files:
            raise ArtifactError(f"{path / MANIFEST}: {name!r} is not among its files")
    for tensor in manifest.tensors:
        _check_segment(manifest, path, tensor.name, tensor.file, tensor.offset + tensor.bytes)
        if tensor.residual is not None:
            end = tensor.residual.offset + tensor.residual.bytes
            _check_segment(manifest, path, tensor.name, RESIDUAL, end)


def _check_segment(manifest: Manifest, path: Path, tensor: str, file: str, end: int) -> None:
    if file not in manifest.files:
        raise ArtifactError(f"{path / MANIFEST}: tensor {tensor!r} is in {file!r}, which is not among its files")
    if end > manifest.files[file].bytes:
        raise ArtifactError(f"{path / MANIFEST}: tensor {tensor!r} ends at byte {end}, beyond the end of {file!r}")
