"""The directory beside the target in which a recovery keeps its last checkpoint."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from bf16kit.artifact.publish import created_parents
from bf16kit.messages.errors import UsageError
from converter.process.quiet import first_line


class Checkpoints:
    """What a recovery ``saved`` last (None: nothing), in a directory that is removed once it has ``finished``."""

    def __init__(self, path: Path) -> None:
        self.path, self.last, self.finished = path, path / "last.ckpt", False
        self.saved: dict[str, Any] | None = None
        self._fixed: dict[str, str] = {}

    def check(self, fixed: dict[str, str]) -> None:
        """Read what was saved last; UsageError if that fails, or if the options ``fixed`` have changed since."""
        self._fixed = fixed
        if not self.last.exists():
            return
        try:
            self.saved = torch.load(self.last, weights_only=True, map_location="cpu")
            before = self.saved["fixed"]
        except Exception as error:  # it is damaged, or of another version
            problem = f"cannot be read: {first_line(error)}"
            raise UsageError(f"{self.last}: {problem}; remove {self.path} to start again") from error
        for name, value in fixed.items():
            if before.get(name) != value:
                raise UsageError(
                    f"--resume: {name} is {value} now, and was {before.get(name)} when this recovery began; pass the"
                    f" same options, or remove {self.path} to start again"
                )

    def save(self, state: Mapping[str, Any]) -> None:
        """Replace the checkpoint at once: a run that is killed meanwhile leaves the one before it.

        Raises :class:`UsageError` if it cannot be written, for example because the disk is full.
        """
        partial = self.last.with_suffix(".tmp")
        try:
            with partial.open("wb") as file:
                torch.save({"fixed": self._fixed, **state}, file)
            partial.replace(self.last)
        except (OSError, RuntimeError) as error:  # RuntimeError: torch's, if the disk is full
            partial.unlink(missing_ok=True)
            raise UsageError(
                f"{self.last}: cannot be written ({shutil.disk_usage(self.path).free >> 20} MiB free):"
                f" {first_line(error)}; free some space and pass --resume, or choose an --out on another disk"
            ) from error


@contextlib.contextmanager
def open_checkpoints(target: Path, *, resume: bool) -> Iterator[Checkpoints]:
    """Yield the checkpoints of a recovery to ``target``; remove them once it has finished, or if there are none.

    Raises :class:`UsageError` if there is one and ``resume`` is false.
    """
    found = Checkpoints(target.with_name(f".{target.name}.recovery"))
    if found.last.exists() and not resume:
        raise UsageError(f"{found.path}: holds an unfinished recovery; pass --resume, or remove it to start again")
    with created_parents(found.path):
        found.path.mkdir(exist_ok=True)
        try:
            yield found
        finally:
            if found.finished or not found.last.exists():
                shutil.rmtree(found.path, ignore_errors=True)
