"""Makes every error of a conversion name its source."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from bf16kit.messages.errors import ConversionError, RuntimeFailure, SourceError


@contextlib.contextmanager
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
