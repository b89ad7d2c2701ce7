"""Changes single keys of a ``serving.yaml``, and leaves the rest as it is."""

from __future__ import annotations

import difflib
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

import yaml

from bf16kit.messages.errors import ConfigError
from service.config.serverconfig import read_mapping
from service.models.serving import load_serving


def update(file: Path, changes: Mapping[str, int]) -> str:
    """Set the keys of ``changes``; return the difference as ``diff -u`` shows it, "" if nothing changes.

    Lines of other keys, and comments, stay as they are. If the file's layout does not allow that, it is written anew
    without comments. The file is replaced in one step. Raises ConfigError if the file is invalid, or cannot be written.
    """
    load_serving(file.parent)  # an invalid file is not edited: the operator must fix it first
    exists = os.path.lexists(file)
    known = read_mapping(file) if exists else {}
    changes = {key: value for key, value in changes.items() if known.get(key) != value}
    if not changes:
        return ""
    try:
        before = file.read_text("utf-8") if exists else ""
        after = _edited(before, changes)
        if _parsed(after) != {**known, **changes}:  # flow style, several documents, keys in quotes
            after = yaml.safe_dump({**known, **changes}, sort_keys=False)
        _replace(Path(os.path.realpath(file)), after)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from None
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), str(file), str(file), lineterm="")
    return "\n".join(lines)


def _edited(text: str, changes: Mapping[str, int]) -> str:
    """Return ``text`` with the values of existing keys replaced, and the other keys added at the end."""
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
    """Write a new file, then rename it to ``file``, so that readers see the old contents or the new."""
    handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.chmod(file.stat().st_mode & 0o777 if file.exists() else 0o644)
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
