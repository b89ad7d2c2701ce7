"""Reading files that may be missing, truncated, unreadable, far too large or links: a repository's, and a user's."""

from __future__ import annotations

import contextlib
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bf16kit.artifact.entries import Segment
from bf16kit.artifact.manifest import MANIFEST, RESIDUAL, FileEntry, Manifest, plain_name
from bf16kit.messages.errors import ArtifactDamaged, ArtifactError, Bf16kitError
from bf16kit.messages.wording import os_error_text, quoted

# Bytes. With 10,000 tensors, and 40,000 nodes in each of three profiles' plans, a manifest has 35 MiB.
_MAX_MANIFEST = 64 << 20


@contextlib.contextmanager
def damaged_if_unreadable(path: Path) -> Iterator[None]:
    """Turn an OSError within the block into ArtifactDamaged: ``path`` is missing or may not be read."""
    try:
        yield
    except OSError as error:
        raise ArtifactDamaged(f"{path}: missing or unreadable ({os_error_text(error)})") from None


def open_inside(
    path: Path, error: type[Bf16kitError], *, within: Path | None = None, where: str = ""
) -> io.BufferedReader:
    """Open ``path`` for reading if it is a regular file, in its directory or reached by a link within that.

    Kubernetes volumes have such links. With ``within``, a link may also lead to another place in that directory.
    Raises ``error``, which begins with ``where`` (by default the path), for another kind of file and for a link that
    leads elsewhere; OSError if the file cannot be opened.
    """
    where = where or str(path)
    real = Path(os.path.realpath(path))
    allowed = [Path(os.path.realpath(each)) for each in (path.parent, within) if each is not None]
    if not stat.S_ISREG(real.stat().st_mode):
        raise error(f"{where}: not a regular file")
    if path.is_symlink() and not any(real.is_relative_to(each) for each in allowed):
        raise error(f"{where}: a link out of {within or path.parent}; put the file itself there")
    return real.open("rb")


def read_inside(
    path: Path, most: int, error: type[Bf16kitError], why: str, *, within: Path | None = None, where: str = ""
) -> bytes:
    """Read the whole file at ``path`` as :func:`open_inside` opens it. The bounds are those of :func:`read_bounded`."""
    with _read(error, where or str(path)), open_inside(path, error, within=within, where=where) as file:
        return _bounded(file, most, error, why, where or str(path))


def read_segment(path: Path, segment: Segment, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """Read the bytes of ``segment``, into ``out`` when given. ArtifactDamaged if the file ends before them."""
    found = np.empty(segment.bytes, np.uint8) if out is None else out
    done = 0
    with damaged_if_unreadable(path), open_inside(path, ArtifactDamaged) as file:
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
    with _read(error, where or str(path)), path.open("rb") as file:
        return _bounded(file, most, error, why, where or str(path))


@contextlib.contextmanager
def _read(error: type[Bf16kitError], where: str) -> Iterator[None]:
    try:
        yield
    except OSError as failure:
        raise error(f"{where}: cannot be read: {os_error_text(failure)}") from None


def _bounded(file: io.BufferedReader, most: int, error: type[Bf16kitError], why: str, where: str) -> bytes:
    data = file.read(most + 1)
    if len(data) > most:
        limit = f"{most >> 20} MiB" if most >= 1 << 20 else f"{most >> 10} KiB"
        raise error(f"{where}: larger than {limit}, {why}")
    return data


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
