"""The directory beside the target in which a recovery keeps what resuming needs; locked while in use."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

from bf16kit.messages.errors import UsageError
from converter.options import Target
from converter.recovery.settings import recovery_path

_PLAN = "recovery.json"
_LAST = "last.ckpt"
ORIGINAL = "original"


class RecoveryDirectory:
    """A locked directory with the last checkpoint, the artifact of the original weights, and the options."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.finished = False

    @property
    def checkpoint(self) -> Path:
        """The path of the last checkpoint, whether it exists or not."""
        return self.path / _LAST

    @property
    def last(self) -> Path | None:
        """The last checkpoint, or None if there is none yet."""
        found = self.checkpoint
        return found if found.is_file() else None

    def write_checkpoint(self, write: Callable[[BinaryIO], object]) -> None:
        """Write a checkpoint by ``write`` into a file that is synced and renamed: a killed run leaves the previous one.

        Raises :class:`UsageError` if the file cannot be written, for example because the disk is full.
        """
        partial = self.path / f"{_LAST}.tmp"
        recorder = None
        try:
            with partial.open("wb") as file:
                recorder = _ErrorRecorder(file)
                write(cast("BinaryIO", recorder))
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.checkpoint)
            _sync(self.path)
        except Exception as error:
            partial.unlink(missing_ok=True)  # the partial file takes space that the user has to free
            cause = error if recorder is None or recorder.failed is None else recorder.failed
            if not isinstance(cause, OSError):
                raise
            raise UsageError(self._write_error(cause)) from error

    def _write_error(self, error: OSError) -> str:
        free = shutil.disk_usage(self.path).free >> 20
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        problem = f"disk full ({free} MiB free)" if full else f"cannot be written ({error.strerror or error})"
        remedy = "free some space" if full else "mend that"
        if self.last is None:
            return (
                f"{self.checkpoint}: {problem}, so no checkpoint was kept; {remedy}, or choose an --out on another disk"
            )
        return (
            f"{self.checkpoint}: {problem}; the checkpoint before it is intact: {remedy}, and continue with --resume (a"
            " larger --checkpoint-every writes fewer checkpoints; each replaces the last)"
        )

    def check_options(self, current: Mapping[str, Any]) -> None:
        """Record the options at the start of a recovery; when it is resumed, check that they are the same.

        Raises :class:`UsageError` that names the first option that differs. Weights trained half by one option and half
        by another would match no options at all.
        """
        file = self.path / _PLAN
        now = json.loads(json.dumps(current))
        if self.last is None or not file.is_file():
            shutil.rmtree(self.path / ORIGINAL, ignore_errors=True)  # of a killed run, perhaps with other options
            file.write_text(json.dumps(now, sort_keys=True, indent=1) + "\n", "utf-8")
            return
        try:
            before = json.loads(file.read_text("utf-8"))
        except ValueError:
            raise UsageError(f"{file}: damaged; remove {self.path} to start again") from None
        for name in sorted(now.keys() | before.keys()):
            if now.get(name) != before.get(name):
                raise UsageError(
                    f"--resume: {name} is {now.get(name)!r} now, and was {before.get(name)!r} when this recovery"
                    f" began; pass the same options, or remove {self.path} to start again"
                )


@contextlib.contextmanager
def open_directory(target: Target, *, resume: bool) -> Iterator[RecoveryDirectory]:
    """Yield the directory of a recovery to ``target``; remove it if ``finished``, or if nothing can be resumed from it.

    Raises :class:`UsageError` if another recovery uses it, or if it holds a checkpoint and ``resume`` is false.
    """
    path = recovery_path(target)
    made = tuple(parent for parent in path.parents if not parent.exists())
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{path}: cannot be created ({error.strerror})") from None
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"{path}: another recovery to {target.path} is running") from None
        found = RecoveryDirectory(path)
        if found.last is not None and not resume:
            raise UsageError(
                f"{path}: holds an unfinished recovery; continue it with --resume, or remove that directory to start"
                " again"
            )
        try:
            yield found
        finally:
            if found.finished or found.last is None:
                shutil.rmtree(path, ignore_errors=True)
                with contextlib.suppress(OSError):  # not empty: published, or used by another
                    for parent in made:
                        parent.rmdir()
    finally:
        os.close(lock)


class _ErrorRecorder:
    """A file that remembers why writing failed, because torch.save may report another error."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.failed: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.failed = self.failed or error
            raise

    def flush(self) -> None:
        """Do nothing: the code that opened the file flushes it, so that only writing can fail here."""


def _sync(directory: Path) -> None:
    """Sync ``directory``, so that a rename in it survives a loss of power."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
