"""Describes an error in the user's own code, with the file and line where it was raised."""

from __future__ import annotations

import re
import sysconfig
import traceback
from pathlib import Path

from bf16kit.messages.wording import brief
from converter.process.quiet import first_line

_OURS = Path(__file__).parents[1]
_INSTALLED = tuple(
    Path(path) for name, path in sysconfig.get_paths().items() if name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_FRAME = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+)', re.MULTILINE)
_CARRIED = "Original Traceback"  # torch's DataLoader writes this for an error in one of its workers


def describe_user_error(error: BaseException) -> str:
    """Return ``ValueError: message (file.py, line 3)``: the innermost frame outside bf16kit and installed packages.

    If all frames are in packages, return the innermost of those.
    """
    text = str(error)
    if _CARRIED in text:
        frames = [(found["file"], int(found["line"])) for found in _FRAME.finditer(text)]
        last = [line.strip() for line in text.splitlines() if line.strip()][-1]
        return brief(last) + _place(frames)
    message = f"it called sys.exit({error.code!r})" if isinstance(error, SystemExit) else first_line(error)
    return message + user_frame(error)


def user_frame(error: BaseException) -> str:
    """Return the `` (file.py, line 3)`` of :func:`describe_user_error`; empty if all frames are bf16kit's own."""
    return _place([(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)])


def _place(frames: list[tuple[str, int]]) -> str:
    outside = [(file, line) for file, line in frames if not (file.startswith("<") or Path(file).is_relative_to(_OURS))]
    own = [(file, line) for file, line in outside if not any(map(Path(file).is_relative_to, _INSTALLED))]
    if not outside:
        return ""
    file, line = (own or outside)[-1]
    return f" ({file}, line {line})"
