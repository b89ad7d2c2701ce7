"""Hides what torch, transformers and their exporters print, warn and log, and says in a line what went wrong."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

from bf16kit.messages.errors import ConversionError, RuntimeFailure, SourceError
from bf16kit.messages.wording import brief

# The start of TorchScript's message that an operator of its program failed.
_INTERPRETER = "The following operation failed in the TorchScript interpreter"


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
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)


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


@contextmanager
def prefix_errors(source: Path) -> Iterator[None]:
    """Put the path before errors that do not name ``source``; report memory or recursion limits as errors of it."""
    try:
        yield
    except (ConversionError, RuntimeFailure, SourceError) as error:
        if source.name in str(error):
            raise
        raise type(error)(f"{source}: {error}") from error
    except MemoryError as error:
        raise ConversionError(f"{source}: out of memory; it needs more than this machine has free") from error
    except RecursionError as error:
        raise ConversionError(f"{source}: nested too deeply to be converted") from error
