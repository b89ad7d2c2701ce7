"""Formats that users try but that are not converted: recognised by content and rejected by name, with a remedy.

``TABLE`` lists them; ``files``, ``archives`` and ``directories`` recognise them. Nothing here runs or unpickles
anything. Of a file, only the first and last bytes and the lengths that lead from field to field are read.
"""

from __future__ import annotations

from pathlib import Path

from bf16kit.messages.errors import NoCheckpoint, SourceError
from converter.read.foreign import archives, directories, files
from converter.read.foreign.table import TABLE

__all__ = ["TABLE", "refuse_directory", "refuse_file", "refuse_json", "refuse_missing", "refuse_zip"]


def refuse_file(path: Path, head: bytes) -> None:
    """Raise :class:`SourceError` if the file at ``path``, whose first bytes are ``head``, has a foreign format."""
    _refuse(path, files.of_file(path, head))


def refuse_zip(path: Path, names: set[str]) -> None:
    """Raise :class:`SourceError` if a zip archive with records called ``names`` has a foreign format."""
    _refuse(path, archives.of_zip(names))


def refuse_json(path: Path, fields: object) -> None:
    """Raise :class:`SourceError` if a JSON document has a foreign format."""
    _refuse(path, archives.of_json(fields))


def refuse_directory(path: Path) -> None:
    """Raise :class:`SourceError` if the directory ``path`` has a foreign format."""
    found = directories.of_directory(path)
    if found is not None:
        name, detail = found
        _refuse(path, name, detail)


def refuse_missing(path: Path) -> None:
    """Raise :class:`SourceError` if ``path`` is the prefix of a TensorFlow 1 checkpoint's file names."""
    if path.with_name(f"{path.name}.index").is_file():
        _refuse(path, "tensorflow checkpoint")


def _refuse(path: Path, name: str | None, detail: str = "") -> None:
    if name is not None:
        foreign = TABLE[name]
        error = NoCheckpoint if foreign.may_hold_weights else SourceError
        raise error(f"{path}: is {foreign.what}{detail}, which is not converted; {foreign.remedy}")
