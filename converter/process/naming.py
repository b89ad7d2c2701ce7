"""Every error of a conversion says of which source."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from bf16kit.errors import ConversionError, RuntimeFailure, SourceError


@contextlib.contextmanager
def naming(source: Path) -> Iterator[None]:
    """Within it, errors that do not name ``source`` get its path in front; what it made Python run out of is an error
    of the source, too."""
    try:
        yield
    except (ConversionError, RuntimeFailure, SourceError) as error:
        if source.name in str(error):
            raise
        raise type(error)(f"{source}: {error}") from error
    except MemoryError as error:
        raise ConversionError(f"{source}: out of memory; it asks for more than this machine has free") from error
    except RecursionError as error:
        raise ConversionError(f"{source}: nested too deeply to be converted") from error
