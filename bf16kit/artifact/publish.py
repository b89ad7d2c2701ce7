"""Publishing an artifact: written beside its target, synced to disk, and renamed into place as a whole or not at all.

A file's digest is taken when it is first part of a draft, before the draft is run. From then on the file must not
change: what is renamed is what was run.

The staging directory ``.VERSION.tmp-PID-XXXX`` is beside the target, on the same file system, and is locked while its
process lives. The kernel releases the lock when the process dies, in whatever way and container. The next conversion to
the same target then removes the directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.digests import Digests
from bf16kit.artifact.manifest import MANIFEST, FileEntry, Manifest, plain_name
from bf16kit.artifact.weightfile import WeightWriter
from bf16kit.messages.errors import ArtifactDamaged, ArtifactExists, Bf16kitError, ConversionError, UsageError
from bf16kit.messages.wording import os_error_text

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_SCRATCH = ".bf16kit-"  # what the names of files that hold weights while a graph runs begin with
_CHANGED = (
    "a file changed after it was written, nothing was published. Another program changed it, or this machine's memory"
    " or disk is faulty; convert again"
)
_NEARLY_FULL = 1 << 20  # bytes free; below this, a failure of a library that hides errno is blamed on a full disk
_AT_FDCWD = -100
_NOREPLACE = 1
_EXCHANGE = 2
_NOT_OFFERED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)  # old kernels; file systems that cannot


@contextlib.contextmanager
def staging(target: str | Path, *, force: bool = False) -> Iterator[StagingArtifact]:
    """Create a directory to write an artifact into; it is removed at the end unless the body calls ``publish``.

    ``force`` replaces an artifact (or an empty directory) at ``target``, nothing else. Raises :class:`ArtifactExists`
    when the target is in the way, and :class:`UsageError` when it cannot be written or the disk is full, whatever the
    body was doing then.
    """
    target = Path(target).absolute()
    check_target(target, force)
    # explained twice: creating the directory may fail, and a full disk must be detected before the directory is removed
    with (
        _created_parents(target) as created,
        _explaining_disk_errors(target),
        _locked_directory(target) as path,
        _explaining_disk_errors(target),
    ):
        staged = StagingArtifact(target, path, force, created)
        try:
            yield staged
        finally:
            staged.close()


class StagingArtifact:
    """An artifact being written. ``path`` is a directory that takes any file with a plain name."""

    def __init__(self, target: Path, path: Path, force: bool, created: Sequence[Path] = ()) -> None:
        self.target = target
        self.path = path
        self._force = force
        self._created_parents = tuple(created)
        self._writers: dict[str, WeightWriter] = {}
        self._sealed: dict[str, FileEntry] = {}
        self._digests = Digests()

    def writer(self, name: str) -> WeightWriter:
        """Open a new file of tensors; it is closed when the artifact is published, if not before."""
        writer = WeightWriter(self.path / plain_name(name))
        self._writers[name] = writer
        return writer

    def remove(self, name: str) -> None:
        """Remove the file ``name`` if there is one; another may then be written in its place."""
        self._sealed.pop(name, None)
        (self.path / name).unlink(missing_ok=True)

    def draft(self, manifest: Manifest) -> Artifact:
        """Return the artifact as written so far, to be loaded and run before it is published. Closes the writers.

        Raises :class:`ConversionError` if a file has changed since an earlier draft.
        """
        sealed = manifest.model_copy(update={"files": self._files()})
        (self.path / MANIFEST).write_bytes(sealed.dumps())
        return Artifact.open(self.path, verify=False)

    def publish(self, manifest: Manifest) -> Artifact:
        """Fill in the digest of every file, write the manifest, sync to disk, and rename onto the target.

        Every file is read once more before that, and must have the digest that it had when it was first drafted.
        Returns the artifact at its target. ``manifest.files`` is ignored; sub-directories raise ValueError.
        """
        self.draft(manifest)
        for path in self.path.iterdir():
            _sync(path)
        _sync(self.path)
        try:
            Artifact.open(self.path, verify=True)
        except ArtifactDamaged as error:
            raise ConversionError(f"{_CHANGED}: {error}") from error
        self._rename()
        # A directory's name is stored in its parent: without this sync a crash may lose the artifact and its new
        # parents.
        _sync(self.target.parent)
        for directory in self._created_parents:
            with contextlib.suppress(PermissionError):  # may be unreadable; the artifact is published anyway
                _sync(directory.parent)
        return Artifact.open(self.target, verify=False)

    def close(self) -> None:
        """Close the writers that are still open after a failure.

        Data that cannot be flushed is lost with the directory.
        """
        for writer in self._writers.values():
            with contextlib.suppress(OSError):
                writer.close()

    def _files(self) -> dict[str, FileEntry]:
        files = (path for path in sorted(self.path.iterdir()) if not path.name.startswith(_SCRATCH))
        return {path.name: self._entry(path) for path in files if path.name != MANIFEST}

    def _entry(self, path: Path) -> FileEntry:
        """Return digest and size of a file, which must not have changed since it was first asked for."""
        if path.is_symlink() or not path.is_file():
            raise ValueError(f"{path}: an artifact holds regular files only")
        writer = self._writers.pop(path.name, None)
        if writer is not None:
            writer.close()
        entry = self._digests.entry(path)
        if self._sealed.setdefault(path.name, entry) != entry:
            raise ConversionError(f"{_CHANGED}: {path.name}")
        return entry

    def _rename(self) -> None:
        check_target(self.target, self._force)
        aside = self.path.with_name(f"{self.path.name}-old")
        try:
            if self._force and self.target.is_dir():
                shutil.rmtree(exchange(self.path, self.target, aside))
            else:
                rename_new(self.path, self.target)
        except FileExistsError:
            raise ArtifactExists(f"{self.target}: another conversion was published there in the meantime") from None


def check_target(target: Path, force: bool) -> None:
    """Raise :class:`ArtifactExists` if ``target`` exists, unless ``force`` is true and it may be replaced."""
    if not os.path.lexists(target):
        return
    if not force:
        raise ArtifactExists(f"{target}: already exists; choose another version, or replace it with --force")
    if target.is_symlink() or not target.is_dir():
        raise ArtifactExists(f"{target}: not a directory; --force replaces only artifacts")
    if any(target.iterdir()) and not (target / MANIFEST).is_file():
        raise ArtifactExists(f"{target}: a directory without {MANIFEST}; --force replaces only artifacts")


@contextlib.contextmanager
def _created_parents(target: Path) -> Iterator[tuple[Path, ...]]:
    """Create the directories above the target, and remove them if nothing was published in them.

    Yields the created ones, innermost first.
    """
    created = tuple(parent for parent in target.parents if not parent.exists())
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{target.parent}: cannot be created ({os_error_text(error)})") from None
    try:
        yield created
    finally:
        with contextlib.suppress(OSError):  # not empty: published, or used by another
            for parent in created:
                parent.rmdir()


@contextlib.contextmanager
def _explaining_disk_errors(target: Path) -> Iterator[None]:
    """Raise UsageError when the cause of a failure is a disk that is full or not writable."""
    try:
        yield
    except Bf16kitError:
        raise
    except Exception as error:
        free = shutil.disk_usage(target.parent).free
        code = error.errno if isinstance(error, OSError) else None
        if code in _FULL or free < _NEARLY_FULL:
            raise UsageError(
                f"{target}: disk full ({free >> 20} MiB free), nothing was published; free some space, or choose a"
                " directory on another disk"
            ) from error
        if isinstance(error, OSError) and code in _DENIED and _below(error, target.parent):
            raise UsageError(f"{target}: cannot be written ({os_error_text(error)})") from error
        raise


def _below(error: Exception, directory: Path) -> bool:
    name = getattr(error, "filename", None)
    return isinstance(name, (str, os.PathLike)) and Path(name).is_relative_to(directory)


@contextlib.contextmanager
def _locked_directory(target: Path) -> Iterator[Path]:
    """Create and lock a new directory beside the target; at the end it is removed if it still has its own name."""
    _remove_stale(target)
    path, lock = _make_locked(target)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _make_locked(target: Path) -> tuple[Path, int]:
    while True:
        path = target.with_name(f".{target.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
        path.mkdir()
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        if _try_lock(lock) and path.exists():
            return path, lock
        os.close(lock)  # another conversion found it before it was locked, took it for stale, and is removing it


def _remove_stale(target: Path) -> None:
    """Remove the directories of dead conversions to this target; a live conversion holds its lock."""
    for path in target.parent.iterdir():
        if not path.name.startswith(f".{target.name}.tmp-"):
            continue
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            continue  # removed meanwhile, or not a directory
        if _try_lock(lock):
            shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename_new(source: Path, target: Path) -> None:
    """Rename ``source`` to ``target``; FileExistsError when the target exists, even as an empty directory."""
    if _renameat2(source, target, _NOREPLACE):
        return
    if os.path.lexists(target):  # without renameat2, rename would quietly replace an empty directory
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    source.rename(target)


def exchange(source: Path, target: Path, aside: Path) -> Path:
    """Replace the directory ``target`` with the directory ``source``; return the new path of the old one.

    That path is ``source``, or ``aside`` on systems that cannot exchange two names. There the old directory is renamed
    first, ``target`` is missing for a moment, and the old one is renamed back when the second step fails.
    """
    if _renameat2(source, target, _EXCHANGE):
        return source
    target.rename(aside)
    try:
        source.rename(target)
    except OSError:
        aside.rename(target)
        raise
    return aside


def _renameat2(source: Path, target: Path, flags: int) -> bool:
    """Call Linux's renameat2; return False where it is not available."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NOT_OFFERED:
        return False
    raise OSError(code, os.strerror(code), str(source), None, str(target))
