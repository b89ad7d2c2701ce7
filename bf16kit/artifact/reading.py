"""Reading and hashing files, of artifacts or users, that may be missing, truncated, unreadable, too large or links."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bf16kit.artifact.manifest import MANIFEST, RESIDUAL, FileEntry, Manifest, Segment
from bf16kit.messages.errors import ArtifactDamaged, ArtifactError, Bf16kitError
from bf16kit.messages.wording import os_error_text, quoted

# Bytes. With 10,000 tensors, and 40,000 nodes in each of three profiles' plans, a manifest has 35 MiB.
_MAX_MANIFEST = 64 << 20
# File systems take timestamps from the kernel's coarse clock, which ticks every 1 to 10 ms: two writes within one tick
# get the same timestamp.
_TICK_NS = 20_000_000


@contextlib.contextmanager
def damaged_if_unreadable(where: object, error: type[Bf16kitError] = ArtifactDamaged) -> Iterator[None]:
    """Turn an OSError within the block into ``error`` about ``where``: it is missing or may not be read."""
    try:
        yield
    except OSError as failure:
        again = error is ArtifactDamaged and isinstance(failure, FileNotFoundError)
        remedy = "; copy or convert the artifact again" if again else ""
        raise error(f"{where}: cannot be read: {os_error_text(failure)}{remedy}") from None


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


def read_bounded(
    path: Path, most: int, error: type[Bf16kitError], why: str, *, within: Path | None = None, where: str = ""
) -> bytes:
    """Read the whole file at ``path``, of at most ``most`` bytes; never more, whatever size it claims.

    With ``within``, it is opened as :func:`open_inside` does. Raises ``error``, which begins with ``where`` (by default
    the path), when the file cannot be read, and with ``why`` when it is larger.
    """
    where = where or str(path)
    with (
        damaged_if_unreadable(where, error),
        path.open("rb") if within is None else open_inside(path, error, within=within, where=where) as file,
    ):
        data = file.read(most + 1)
    if len(data) > most:
        limit = f"{most >> 20} MiB" if most >= 1 << 20 else f"{most >> 10} KiB"
        raise error(f"{where}: larger than {limit}, {why}")
    return data


def read_segment(path: Path, segment: Segment, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """Read the bytes of ``segment``, into ``out`` when given. ArtifactDamaged if the file ends before them."""
    found = np.empty(segment.bytes, np.uint8) if out is None else out
    with damaged_if_unreadable(path), open_inside(path, ArtifactDamaged) as file:
        file.seek(segment.offset)
        done = file.readinto(found.data)
    if done < segment.bytes:
        raise ArtifactDamaged(f"{path}: truncated to {segment.offset + done} bytes while it was read")
    return found


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the artifact in ``path``; ArtifactError or a subclass if it is missing or not valid."""
    where = path / MANIFEST
    with damaged_if_unreadable(where):
        if not path.is_dir():
            what = "not a directory, as an artifact is" if path.exists() else "no such directory"
            raise ArtifactError(f"{path}: {what}")
        if not where.is_file():
            raise ArtifactError(f"{path}: not an artifact, it has no {MANIFEST}, as REPOSITORY/MODEL/VERSION has")
    return Manifest.loads(read_bounded(where, _MAX_MANIFEST, ArtifactDamaged, "not a manifest", within=path), where)


def check_files(path: Path, manifest: Manifest) -> None:
    """Check before files are read that each is a regular file in ``path`` of the size that ``manifest`` lists.

    It must list every file that it refers to, and every tensor must lie within its file.
    """
    for name, entry in manifest.files.items():
        with damaged_if_unreadable(path / name), open_inside(path / name, ArtifactError) as file:
            size = os.fstat(file.fileno()).st_size
        if size != entry.bytes:
            raise ArtifactDamaged(
                f"{path / name}: {size} bytes, the manifest says {entry.bytes}; copy or convert the artifact again"
            )
    for user, name, end in _references(manifest):
        known = manifest.files.get(name)
        if known is None:
            raise ArtifactError(f"{path / MANIFEST}: {user} is in {quoted(name)}, which is not among its files")
        if end > known.bytes:
            raise ArtifactError(f"{path / MANIFEST}: {user} ends at byte {end}, beyond the end of {quoted(name)}")


def _references(manifest: Manifest) -> Iterator[tuple[str, str, int]]:
    """Yield what lies in a file, the file's name, and the byte where it ends, 0 for a whole file."""
    whole = [(f"profile {quoted(name)}", file) for name, p in manifest.profiles.items() for file in (p.graph, p.golden)]
    whole += [(f"export {quoted(name)}", file) for name, export in manifest.exports.items() for file in export.files]
    whole += [(name, getattr(manifest, name)) for name in ("reference", "golden", "measurements")]
    yield from ((user, file, 0) for user, file in whole if file is not None)
    for tensor in manifest.tensors:
        yield f"tensor {quoted(tensor.name)}", tensor.file, tensor.offset + tensor.bytes
        if tensor.residual is not None:
            yield f"tensor {quoted(tensor.name)}", RESIDUAL, tensor.residual.offset + tensor.residual.bytes


@dataclass(slots=True)
class Digests:
    """Cached digests of files; one is read again only when its inode, size or times have changed."""

    _known: dict[Path, tuple[tuple[int, ...], FileEntry]] = field(default_factory=dict)

    def entry(self, path: Path) -> FileEntry:
        """Return digest and size of ``path``; the file is read when it is new or has changed."""
        found = path.stat()  # before reading: a file that changes meanwhile is read again
        stamp = (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        known = self._known.get(path)
        if known is not None and known[0] == stamp:
            return known[1]
        age = time.time_ns() - found.st_ctime_ns
        if 0 <= age < _TICK_NS:  # wait until a later change would get another stamp
            time.sleep((_TICK_NS - age) / 1e9)
        with open_inside(path, ArtifactDamaged) as file:
            entry = FileEntry(sha256=hashlib.file_digest(file, "sha256").hexdigest(), bytes=file.tell())
        self._known[path] = (stamp, entry)
        return entry
