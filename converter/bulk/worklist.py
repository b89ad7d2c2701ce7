"""Lists the checkpoints in a directory, each with every file that it consists of."""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
from dataclasses import dataclass
from pathlib import Path

from bf16kit.messages.errors import NoCheckpoint, SourceError, UsageError
from converter.read.detect import Kind, recognise
from converter.read.safetensors_file import read_sharded
from converter.source import digest_files


@dataclass(frozen=True, slots=True)
class Item:
    """One checkpoint. ``files`` are its own and those that its arguments name; ``problem`` says why it is unusable."""

    model: str
    source: Path
    arguments: list[str]
    files: list[Path]
    problem: str = ""

    def digest(self) -> str:
        """Return the sha256 of its arguments and files; code that an argument names is included by name only."""
        files = digest_files(self.files, lambda _: None)
        return hashlib.sha256(f"{json.dumps(self.arguments)} {files}".encode()).hexdigest()


def checkpoints(directory: Path, repository: Path) -> tuple[dict[Path, list[Path] | str], list[str]]:
    """Return the checkpoints directly in ``directory`` with their files, and why each other file is not one.

    A ``repository`` inside it is ignored, and so are hidden names. A checkpoint that is damaged, or of a format that is
    not converted, has the problem in place of its files. Raises :class:`UsageError` if there is none.
    """
    found: dict[Path, list[Path] | str] = {}
    skipped: dict[Path, str] = {}
    for path in sorted(directory.iterdir()):
        if path.name.startswith(".") or path.resolve() == repository.resolve():
            continue
        try:
            recognise(path)
            found[path] = files_of(path)
        except SourceError as error:
            (skipped if isinstance(error, NoCheckpoint) else found)[path] = str(error).removeprefix(f"{path}: ")
    parts = {part for files in found.values() if not isinstance(files, str) for part in files[1:]}
    reasons = [f"{path.name}: {reason}" for path, reason in skipped.items() if path not in parts]
    if not found:
        raise UsageError("\n  ".join([f"{directory}: holds no checkpoint", *reasons[:5]]))
    return {path: files for path, files in found.items() if path not in parts}, reasons


def files_of(path: Path) -> list[Path]:
    """Return every file of the checkpoint at ``path``, the main one first; or of the rules or samples there."""
    if path.is_dir():
        return _files_in(path)
    kind = None
    with contextlib.suppress(SourceError):
        kind = recognise(path)
    if kind is Kind.SHARDED:
        return read_sharded(path)[1]
    if kind is not Kind.ONNX:
        return [path]
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as graph:
        # A graph names the files of its external data; one file too many only converts once too often.
        return [path, *(one for one in _files_in(path.parent) if one != path and graph.find(one.name.encode()) >= 0)]


def _files_in(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())
