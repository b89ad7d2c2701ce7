"""Publishing an artifact: written beside its target, synced to disk, and renamed into place as a whole or not at all.

A file's digest is taken when it is first part of a draft, before the draft is run. From then on the file must not
change: what is renamed is what was run. The staging directory ``.VERSION.tmp-PID-XXXX`` is on the target's file system,
and locked while its process lives, in whatever container. The next conversion to the target removes one without a lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from bf16kit.artifact.artifact import Artifact
from bf16kit.artifact.entries import plain_name
from bf16kit.artifact.manifest import MANIFEST, FileEntry, Manifest
from bf16kit.artifact.reading import Digests
from bf16kit.artifact.weightfile import WeightWriter
from bf16kit.messages.errors import ArtifactDamaged, ArtifactExists, Bf16kitError, ConversionError, UsageError
from bf16kit.messages.wording import os_error_text

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_IN_THE_WAY = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_SCRATCH = ".bf16kit-"  # what the names of files that hold weights while a graph runs begin with
_CHANGED = (
    "a file changed after it was written, nothing was published. Another program changed it, or this machine's memory"
    " or disk is faulty; convert again"
)
_NEARLY_FULL = 1 << 20  # bytes free; below this, a failure of a library that hides errno is blamed on a full disk
_AT_FDCWD = -100
_EXCHANGE = 2


@contextlib.contextmanager
def staging(target: str | Path, *, force: bool = False) -> Iterator[StagingArtifact]:
    """Create a directory to write an artifact into; it is removed at the end unless the body calls ``publish``.

    ``force`` replaces an artifact (or an empty directory) at ``target``, nothing else; otherwise ArtifactExists is
    raised. UsageError when the target cannot be written or the disk is full, whatever the body was doing then.
    """
    target = Path(target).absolute()
    check_target(target, force)
    # explained twice: creating the directory may fail, and a full disk must be detected before the directory is removed
    with (
        created_parents(target) as created,
        explaining_disk_errors(target),
        locked_directory(target) as path,
        explaining_disk_errors(target),
    ):
        yield StagingArtifact(target, path, force, created)


class StagingArtifact:
    """An artifact being written. ``path`` is a directory that takes any file with a plain name."""

    def __init__(self, target: Path, path: Path, force: bool, created: Sequence[Path] = ()) -> None:
        self.target = target
        self.path = path
        self._force = force
        self._created_parents = tuple(created)
        self._sealed: dict[str, FileEntry] = {}
        self._digests = Digests()

    def writer(self, name: str) -> WeightWriter:
        """Open a new file of tensors, to be closed before the next draft."""
        return WeightWriter(self.path / plain_name(name))

    def remove(self, name: str) -> None:
        """Remove the file ``name`` if there is one; another may then be written in its place."""
        self._sealed.pop(name, None)
        (self.path / name).unlink(missing_ok=True)

    def draft(self, manifest: Manifest) -> Artifact:
        """Return the artifact as written so far, to be run; ConversionError if a file changed since the last draft."""
        written = (path for path in sorted(self.path.iterdir()) if not path.name.startswith(_SCRATCH))
        files = {path.name: self._entry(path) for path in written if path.name != MANIFEST}
        sealed = manifest.model_copy(update={"files": files})
        (self.path / MANIFEST).write_bytes(sealed.dumps())
        return Artifact.open(self.path, verify=False)

    def publish(self, manifest: Manifest) -> Artifact:
        """Fill in the digest of every file, write the manifest, sync to disk, and rename onto the target.

        Every file is read once more before that, and must have the digest that it had when it was first drafted.
        Returns the artifact at its target.
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
        # A directory's name is stored in its parent: without this a crash may lose the artifact and its new parents.
        _sync(self.target.parent)
        for directory in self._created_parents:
            with contextlib.suppress(PermissionError):  # may be unreadable; the artifact is published anyway
                _sync(directory.parent)
        return Artifact.open(self.target, verify=False)

    def _entry(self, path: Path) -> FileEntry:
        """Return digest and size of a file, which must not have changed since it was first asked for."""
        if path.is_symlink() or not path.is_file():
            raise ValueError(f"{path}: an artifact holds regular files only")
        entry = self._digests.entry(path)
        if self._sealed.setdefault(path.name, entry) != entry:
            raise ConversionError(f"{_CHANGED}: {path.name}")
        return entry

    def _rename(self) -> None:
        check_target(self.target, self._force)
        if self._force and self.target.is_dir():
            shutil.rmtree(exchange(self.path, self.target, self.path.with_name(f"{self.path.name}-old")))
            return
        try:
            self.path.rename(self.target)  # replaces nothing but an empty directory
        except OSError as error:
            if error.errno not in _IN_THE_WAY:
                raise
            raise ArtifactExists(f"{self.target}: another conversion was published there in the meantime") from None


def check_target(target: Path, force: bool) -> None:
    """Raise :class:`ArtifactExists` if ``target`` exists, unless ``force`` is true and it may be replaced."""
    if not os.path.lexists(target):
        return
    if not force:
        raise ArtifactExists(f"{target}: already exists; choose another version, or replace it with --force")
    directory = target.is_dir() and not target.is_symlink()
    if not directory or (any(target.iterdir()) and not (target / MANIFEST).is_file()):
        raise ArtifactExists(f"{target}: not a directory with {MANIFEST}; --force replaces only artifacts")


@contextlib.contextmanager
def created_parents(target: Path) -> Iterator[tuple[Path, ...]]:
    """Yield the directories created above the target, innermost first; remove them if nothing was published there."""
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
def explaining_disk_errors(target: Path) -> Iterator[None]:
    """Raise UsageError when the cause of a failure is a disk that is full or not writable."""
    try:
        yield
    except Bf16kitError:
        raise
    except Exception as error:
        free = shutil.disk_usage(target.parent).free
        code, path = (error.errno, error.filename) if isinstance(error, OSError) else (None, None)
        if code in _FULL or (code is None and free < _NEARLY_FULL):
            raise UsageError(
                f"{target}: disk full ({free >> 20} MiB free), nothing was published; free some space, or choose a"
                " directory on another disk"
            ) from error
        below = isinstance(path, str | os.PathLike) and Path(path).is_relative_to(target.parent)
        if isinstance(error, OSError) and code in _DENIED and below:
            raise UsageError(f"{target}: cannot be written ({os_error_text(error)})") from error
        raise


@contextlib.contextmanager
def locked_directory(target: Path) -> Iterator[Path]:
    """Create and lock a new directory beside the target; at the end it is removed if it still has its own name.

    Those of dead conversions to this target are removed first; a live conversion holds its lock.
    """
    for path in target.parent.glob(f".{glob.escape(target.name)}.tmp-*"):
        with contextlib.suppress(OSError), _locked(path):  # removed meanwhile, no directory, or a live conversion's
            shutil.rmtree(path, ignore_errors=True)
    while True:
        path = target.with_name(f".{target.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
        path.mkdir()
        with contextlib.ExitStack() as lock:
            try:
                lock.enter_context(_locked(path))
            except (BlockingIOError, FileNotFoundError):
                continue  # another conversion found it before it was locked, took it for stale, and is removing it
            if not path.exists():
                continue  # it has removed it
            try:
                yield path
            finally:
                shutil.rmtree(path, ignore_errors=True)
            return


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the lock of ``directory``; OSError if another process holds it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def exchange(source: Path, target: Path, aside: Path) -> Path:
    """Replace the directory ``target`` with the directory ``source``; return the new path of the old one.

    That path is ``source``, or ``aside`` on systems that cannot exchange two names. There the old directory is renamed
    first, ``target`` is missing for a moment, and the old one is renamed back when the second step fails.
    """
    if _exchanged(source, target):
        return source
    target.rename(aside)
    try:
        source.rename(target)
    except OSError:
        aside.rename(target)
        raise
    return aside


def _exchanged(source: Path, target: Path) -> bool:
    """Call Linux's renameat2 to exchange two names; return False where the system or the file system cannot."""
    call = getattr(ctypes.CDLL(None), "renameat2", None)
    names = (_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target))
    return call is not None and call(*names, _EXCHANGE) == 0
