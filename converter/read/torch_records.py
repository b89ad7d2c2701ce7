"""Checks a torch zip file where torch does not: its records, and the names in its pickle.

torch maps the file and takes as many bytes from each record as the pickle asks for. It checks neither the record's size
nor whether it is compressed, so a false claim reads other records' bytes without an error.
"""

from __future__ import annotations

import pickletools
import zipfile
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path

from bf16kit.messages.errors import RuntimeFailure, SourceError
from bf16kit.runtime import torchzip

_NAME_LENGTH, _EXTRA_LENGTH, _LOCAL_HEADER = 26, 28, 30  # of a record's local header in a zip file
_LONGEST_NAME = 1000
_NO_ARCHIVE = (
    OSError,
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    RuntimeError,  # an encrypted record, and as NotImplementedError an unknown compression
    ValueError,
)  # zipfile's errors for an archive that it cannot read


def check_stored(path: Path) -> None:
    """Raise :class:`SourceError` for records that torch does not write or would read differently.

    They are: a compressed record, which torch would unpack to any size it claims; an uncompressed record with two
    sizes; and records that torch would find elsewhere. An archive that cannot be read is left to torch to report.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            records = torchzip.records(archive)
    except _NO_ARCHIVE:
        return
    except RuntimeFailure as error:
        raise SourceError(f"{path}: damaged: {error}") from None
    for info in records:
        if info.compress_type != zipfile.ZIP_STORED:
            raise SourceError(f"{path}: record {info.filename!r} is compressed, which torch never does")
        if info.compress_size != info.file_size:
            sizes = f"{info.file_size} bytes, but {info.compress_size} are stored"
            raise SourceError(f"{path}: damaged: record {info.filename!r} claims {sizes}")


def check_names(path: Path) -> None:
    """Raise :class:`SourceError` if a pickle names a class of more than a thousand characters.

    torch searches its own error message with a regular expression whose time grows with the square of the name: minutes
    for 100 KB. A file that is no pickle is left to torch to report.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
            pickles = [archive.read(info) for info in infos if info.filename.lower().endswith("/data.pkl")]
    except _NO_ARCHIVE:
        return
    for data in pickles:
        for name in _globals(data):
            if len(name) > _LONGEST_NAME:
                raise SourceError(
                    f"{path}: damaged: names a class of {len(name)} characters, expected at most {_LONGEST_NAME}"
                )


def _globals(data: bytes) -> Iterator[str]:
    """Yield module and name of each class or function that a pickle asks for, as far as it can be read."""
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name in ("GLOBAL", "INST"):
                yield str(argument)
    except (ValueError, IndexError, UnicodeDecodeError, OverflowError):
        return


def check(path: Path, storages: Collection[tuple[int, int]]) -> None:
    """Check ``storages``, the address and size of each storage that torch mapped from ``path``.

    Raises :class:`SourceError` unless each is exactly one record: its size, and its distance from the others.
    """
    if not storages:
        return
    try:
        records = _records(path)
    except _NO_ARCHIVE as error:
        raise SourceError(f"{path}: is a truncated or damaged zip archive ({error})") from error
    first, size = min(storages)
    for offset, nbytes in records:
        if nbytes == size and {(address - first + offset, length) for address, length in storages} <= records:
            return
    raise SourceError(f"{path}: damaged: its tensors claim other sizes than the records that hold them")


def _records(path: Path) -> set[tuple[int, int]]:
    """Return offset and size of every record's bytes."""
    found = set()
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for info in archive.infolist():
            file.seek(info.header_offset)
            header = file.read(_LOCAL_HEADER)
            lengths = (int.from_bytes(header[at : at + 2], "little") for at in (_NAME_LENGTH, _EXTRA_LENGTH))
            found.add((info.header_offset + _LOCAL_HEADER + sum(lengths), info.file_size))
    return found
