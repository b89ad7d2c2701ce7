"""Formats that people try and that are not converted: each is told by its content, and refused by name with what to do.

``TABLE`` has them; ``files``, ``archives`` and ``directories`` recognise them. Nothing here runs or unpickles anything,
and of a file no more is read than its first bytes, its last ones, or the lengths that lead from field to field.
"""

from __future__ import annotations

from pathlib import Path

from bf16kit.errors import NoCheckpoint, SourceError
from converter.sources.foreign import archives, directories, files
from converter.sources.foreign.table import TABLE

__all__ = ["TABLE", "refuse_directory", "refuse_file", "refuse_json", "refuse_missing", "refuse_zip"]


def refuse_file(path: Path, head: bytes) -> None:
    """:class:`SourceError` when the file at ``path``, whose first bytes are ``head``, is of a foreign format."""
    _refuse(path, files.of_file(path, head))


def refuse_zip(path: Path, names: set[str]) -> None:
    """:class:`SourceError` when a zip archive whose records are called ``names`` is of a foreign format."""
    _refuse(path, archives.of_zip(names))


def refuse_json(path: Path, fields: object) -> None:
    """:class:`SourceError` when a JSON document is a foreign format's."""
    _refuse(path, archives.of_json(fields))


def refuse_directory(path: Path) -> None:
    """:class:`SourceError` when the directory ``path`` is of a foreign format."""
    found = directories.of_directory(path)
    if found is not None:
        name, detail = found
        _refuse(path, name, detail)


def refuse_missing(path: Path) -> None:
    """:class:`SourceError` for a path that is the beginning of file names, as TensorFlow 1 names its checkpoints."""
    if path.with_name(f"{path.name}.index").is_file():
        _refuse(path, "tensorflow checkpoint")


def _refuse(path: Path, name: str | None, detail: str = "") -> None:
    if name is not None:
        foreign = TABLE[name]
        error = NoCheckpoint if foreign.data else SourceError
        raise error(f"{path}: is {foreign.what}{detail}, which is not converted; {foreign.remedy}")
