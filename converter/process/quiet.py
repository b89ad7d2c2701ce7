"""Hides what torch, transformers and their exporters print, warn and log, and says in a line what went wrong where."""

from __future__ import annotations

import io
import logging
import re
import sysconfig
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

from bf16kit.messages.errors import ConversionError, RuntimeFailure, SourceError
from bf16kit.messages.wording import brief

# The start of TorchScript's message that an operator of its program failed.
_INTERPRETER = "The following operation failed in the TorchScript interpreter"
_CARRIED = "Original Traceback"  # torch's DataLoader writes this for an error in one of its workers
_FRAME = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+)', re.MULTILINE)
_OURS = Path(__file__).parents[1]
_INSTALLED = tuple(map(Path, map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))))


@contextmanager
def quiet() -> Iterator[None]:
    """Hide what Python code prints, warns or logs while active.

    The progress bar has its own reference to the terminal and stays visible. As ``redirect_stdout``, it affects the
    whole process: it is for the command line, not for threads that print.
    """
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # torch's handlers hold the real stderr, which is not redirected
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def reason(error: BaseException) -> str:
    """Return the first line of the innermost error: exporters and parsers wrap the reason in pages of context."""
    return first_line(innermost(error))


def innermost(error: BaseException) -> BaseException:
    """Return the error that all others were raised from."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def first_line(error: BaseException) -> str:
    """Return the first line of ``error``'s message, with its type, short enough for one of our own messages.

    A line that announces a list, with a colon at its end, is followed by the list's first entry.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):
        lines[0] = f"{lines[0]} {lines[1].removeprefix('- ')}"
    if lines and lines[0].startswith(_INTERPRETER):  # the error follows after the lines of code that led to it
        lines[0] = lines[-1].removeprefix(f"{type(error).__name__}: ")
    return f"{type(error).__name__}: {brief(lines[0])}" if lines else type(error).__name__


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


def user_frame(error: BaseException, *, packages: bool = True) -> str:
    """Return the `` (file.py, line 3)`` of :func:`describe_user_error`; empty if all frames are bf16kit's own.

    It is also empty if all are in ``packages`` where these do not count.
    """
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    return _place(frames, packages=packages)


def _place(frames: list[tuple[str, int]], *, packages: bool = True) -> str:
    outside = [(file, line) for file, line in frames if not (file.startswith("<") or Path(file).is_relative_to(_OURS))]
    own = [(file, line) for file, line in outside if not any(map(Path(file).is_relative_to, _INSTALLED))]
    if not (own or (outside and packages)):
        return ""
    file, line = (own or outside)[-1]
    return f" ({file}, line {line})"


@contextmanager
def prefix_errors(source: Path) -> Iterator[None]:
    """Put the path before errors that do not name ``source``; report memory or recursion limits as errors of it."""
    try:
        yield
    except (ConversionError, RuntimeFailure, SourceError) as error:
        if source.name not in str(error):
            error.args = (f"{source}: {error}",)
        raise
    except MemoryError as error:
        what = f" ({first_line(error)})" if str(error) else ""  # NumPy's has the array's shape
        raise ConversionError(f"{source}: out of memory; it needs more than this machine has free{what}") from error
    except RecursionError as error:
        raise ConversionError(f"{source}: nested too deeply to be converted") from error
