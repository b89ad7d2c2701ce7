"""Checks a torch zip file of weights where torch does not: the records that it maps.

torch maps the file and takes as many bytes from each record as the pickle asks for. It checks neither the record's size
nor whether it is compressed, so a false claim reads other records' bytes without an error.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from bf16kit.messages.errors import SourceError

_NO_ARCHIVE = (
    OSError,
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    RuntimeError,  # an encrypted record, and as NotImplementedError an unknown compression
    ValueError,
)  # zipfile's errors for an archive that it cannot read


def check_stored(path: Path) -> None:
    """Raise :class:`SourceError` for a compressed record, as another zip program writes: torch maps it as it is.

    An archive that cannot be read is left to torch to report.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
    except _NO_ARCHIVE:
        return
    for info in records:
        if info.compress_type != zipfile.ZIP_STORED:
            raise SourceError(f"{path}: record {info.filename!r} is compressed, which torch never does")


def check_bytes(path: Path) -> None:
    """Raise :class:`SourceError` if the archive is truncated, or a record's bytes are not those that were written."""
    try:
        with zipfile.ZipFile(path) as archive:
            changed = archive.testzip()
    except _NO_ARCHIVE as error:
        raise SourceError(f"{path}: is a truncated or damaged zip archive ({error})") from None
    if changed is not None:
        raise SourceError(f"{path}: damaged: its record {changed!r} has other bytes than were written")


def check(path: Path, storages: Collection[tuple[int, int]]) -> None:
    """Check ``storages``, the address and size of each storage that torch mapped from ``path``.

    Raises :class:`SourceError` unless each is exactly one record: its size, and its distance from the others.
    """
    if not storages:
        return
    import torch

    reader: Any = torch._C.PyTorchFileReader(str(path))
    records = {(reader.get_record_offset(name), reader.get_record_size(name)) for name in reader.get_all_records()}
    first, size = min(storages)
    for offset, nbytes in records:
        if nbytes == size and {(address - first + offset, length) for address, length in storages} <= records:
            return
    raise SourceError(f"{path}: damaged: its tensors claim other sizes than the records that hold them")
