"""The directory beside the target in which a recovery keeps what it needs to be resumed, locked while it is used."""

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

from bf16kit.errors import UsageError
from converter.options import Target
from converter.recovery.settings import place

_PLAN = "recovery.json"
_LAST = "last.ckpt"
ORIGINAL = "original"


class Place:
    """A locked directory: the last checkpoint, the artifact of the weights as they were, and what was asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.finished = False

    @property
    def checkpoint(self) -> Path:
        """Where the last checkpoint is, or will be."""
        return self.path / _LAST

    @property
    def last(self) -> Path | None:
        """The last checkpoint, None where there is none yet."""
        found = self.checkpoint
        return found if found.is_file() else None

    def keep(self, write: Callable[[BinaryIO], object]) -> None:
        """Have ``write`` write a checkpoint into a file, synced and renamed: a killed run leaves the one before it.

        Raises :class:`UsageError` where the file cannot be written, a full disk among the reasons.
        """
        partial = self.path / f"{_LAST}.tmp"
        watched = None
        try:
            with partial.open("wb") as file:
                watched = _Watched(file)
                write(cast("BinaryIO", watched))
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.checkpoint)
            _sync(self.path)
        except Exception as error:
            partial.unlink(missing_ok=True)  # what is left of it takes the room that somebody has to find
            cause = error if watched is None or watched.failed is None else watched.failed
            if not isinstance(cause, OSError):
                raise
            raise UsageError(self._not_kept(cause)) from error

    def _not_kept(self, error: OSError) -> str:
        free = shutil.disk_usage(self.path).free >> 20
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        why = f"disk full ({free} MiB free)" if full else f"cannot be written ({error.strerror or error})"
        remedy = "free some space" if full else "mend that"
        if self.last is None:
            return f"{self.checkpoint}: {why}, no checkpoint was kept; {remedy}, or choose an --out on another disk"
        return (
            f"{self.checkpoint}: {why}; the checkpoint before it is whole: {remedy}, and go on with --resume (a"
            " larger --checkpoint-every writes fewer of them, each in place of the last)"
        )

    def agree(self, asked: Mapping[str, Any]) -> None:
        """Keep what was asked for, or hold it against what was asked when this recovery began.

        Raises :class:`UsageError` naming the first option that is another one now: weights that were trained half by
        one and half by another are nobody's.
        """
        file = self.path / _PLAN
        now = json.loads(json.dumps(asked))
        if self.last is None or not file.is_file():
            shutil.rmtree(self.path / ORIGINAL, ignore_errors=True)  # of a run that was killed, and perhaps of others
            file.write_text(json.dumps(now, sort_keys=True, indent=1) + "\n", "utf-8")
            return
        try:
            before = json.loads(file.read_text("utf-8"))
        except ValueError:
            raise UsageError(f"{file}: damaged; remove {self.path} to begin again") from None
        for name in sorted(now.keys() | before.keys()):
            if now.get(name) != before.get(name):
                raise UsageError(
                    f"--resume: {name} is {now.get(name)!r} now, and was {before.get(name)!r} when this recovery began;"
                    f" give the same options, or remove {self.path} to begin again"
                )


@contextlib.contextmanager
def workplace(target: Target, *, resume: bool) -> Iterator[Place]:
    """The place of a recovery to ``target``; removed when it is ``finished``, or when nothing can be resumed from it.

    Raises :class:`UsageError` when another recovery uses it, and when there is a checkpoint that nobody asked to
    ``resume``.
    """
    path = place(target)
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
        found = Place(path)
        if found.last is not None and not resume:
            raise UsageError(
                f"{path}: holds a recovery that did not end; continue it with --resume, or remove that directory to"
                " begin again"
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


class _Watched:
    """A file that remembers why it could not be written: torch.save may say something else of it."""

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
        """Left to whoever opened the file, so that only writing can fail here."""


def _sync(directory: Path) -> None:
    """Have what was renamed in ``directory`` outlast a loss of power."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
