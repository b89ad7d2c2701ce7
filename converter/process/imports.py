"""Imports what the user names as ``pkg.mod:attribute``, and says where in the user's code an error was raised."""

from __future__ import annotations

import importlib
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bf16kit.messages.errors import UsageError
from bf16kit.messages.wording import brief
from converter.process.quiet import first_line

_LIGHTNING = (
    "a LightningModule needs Lightning: pip install 'bf16kit[lightning]', or name a factory of the plain torch module"
)
_EXTRAS = {"lightning": _LIGHTNING, "pytorch_lightning": _LIGHTNING}
_OURS = Path(__file__).parents[1]
_INSTALLED = tuple(
    Path(path) for name, path in sysconfig.get_paths().items() if name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_FRAME = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+)', re.MULTILINE)
_CARRIED = "Original Traceback"  # torch's DataLoader writes this for an error in one of its workers
_SPEC = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def is_import_spec(text: str) -> bool:
    """Whether ``text`` has the form ``pkg.mod:attribute``."""
    return _SPEC.fullmatch(text) is not None


def import_callable(flag: str, text: str) -> Callable[..., Any]:
    """Return the callable that ``flag`` names; modules in the user's working directory are found too.

    Raises :class:`UsageError` if the module or its attribute does not exist or cannot be called.
    """
    if not is_import_spec(text):
        missing = "no such file; " if text.endswith(".onnx") else ""
        raise UsageError(f"{flag} {text!r}: {missing}expected pkg.mod:name, for example mypackage.models:build")
    module_name, _, attribute = text.partition(":")
    try:
        with _working_directory_on_path():
            found: Any = importlib.import_module(module_name)
    except Exception as error:  # the user's module runs at import and may raise anything
        remedy = _remedy(error)
        raise UsageError(
            f"{flag} {text}: cannot import {module_name}: {type(error).__name__}: {error}{user_frame(error)}{remedy}"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{flag} {text}: module {module_name} has no {attribute}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"{flag} {text}: is {type(found).__name__}, expected a function or class")
    return found  # type: ignore[no-any-return]


def _remedy(error: Exception) -> str:
    missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return f"; {_EXTRAS[missing]}" if missing in _EXTRAS else ""


@contextmanager
def _working_directory_on_path() -> Iterator[None]:
    """Add the working directory to the path: a console script lacks it, but users expect ``python -m``'s behaviour."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


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
