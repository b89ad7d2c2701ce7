"""Changing a few keys of a ``serving.yaml``, and nothing else in it."""

from __future__ import annotations

import difflib
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

import yaml

from bf16kit.errors import ConfigError
from service.models.policy import load_serving
from service.process.config import read_mapping


def update(file: Path, changes: Mapping[str, int]) -> str:
    """Set the keys of ``changes`` and return the difference as ``diff -u`` shows it; "" where they are set already.

    Lines of other keys, and comments, stay as they are; a file whose layout does not allow that is written anew without
    its comments. The file is replaced in one step. Raises ConfigError for one that is wrong already, or cannot be
    written.
    """
    load_serving(file.parent)  # whatever is wrong with it is the operator's to mend
    there = os.path.lexists(file)
    known = read_mapping(file) if there else {}
    changes = {key: value for key, value in changes.items() if known.get(key) != value}
    if not changes:
        return ""
    try:
        before = file.read_text("utf-8") if there else ""
        after = _edited(before, changes)
        if _parsed(after) != {**known, **changes}:  # flow style, several documents, keys in quotes
            after = yaml.safe_dump({**known, **changes}, sort_keys=False)
        _replace(Path(os.path.realpath(file)), after)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from None
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), str(file), str(file), lineterm="")
    return "\n".join(lines)


def _edited(text: str, changes: Mapping[str, int]) -> str:
    """Values replaced where their keys stand, and the others added at the end."""
    for key, value in changes.items():
        line = re.compile(rf"^({re.escape(key)}[ \t]*:)[ \t]*[^#\n]*?([ \t]*(?:#.*)?)$", re.MULTILINE)
        text, found = line.subn(rf"\g<1> {value}\g<2>", text, count=1)
        if not found:
            text = f"{text}{'' if not text or text.endswith(chr(10)) else chr(10)}{key}: {value}\n"
    return text


def _parsed(text: str) -> object:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return None


def _replace(file: Path, text: str) -> None:
    """Write beside ``file``, then rename: whoever reads it sees the old one or the new one."""
    handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    beside = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        beside.chmod(file.stat().st_mode & 0o777 if file.exists() else 0o644)
        beside.replace(file)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
