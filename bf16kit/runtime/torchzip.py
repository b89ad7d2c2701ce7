"""Checks that torch finds the same records in a zip file as Python, so that what is loaded is what was checked.

torch reads zip files with miniz. miniz ignores the case of names, and looks for the directory where the file's end says
it is. Python expects the directory right before that end, and cuts names at a zero byte.
"""

from __future__ import annotations

import io
import struct
import zipfile
from typing import IO

from bf16kit.messages.errors import RuntimeFailure

_END = struct.Struct("<4s8xIIH")  # signature, size and offset of the directory, length of a comment
_LOCATOR = struct.Struct("<4s4xQ4x")  # signature, and the offset of the 64-bit end record
_END64 = struct.Struct("<4s36xQQ")  # fields as in _END


def records(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Return the records of the open ``archive``; no two of them have the same name to torch.

    Raises :class:`RuntimeFailure` if torch would find other records.
    """
    assert archive.fp is not None  # noqa: S101 - for the type checker: it is open
    _check_end(archive.fp)
    found = archive.infolist()
    seen: dict[str, str] = {}
    for info in found:
        if info.filename != info.orig_filename:
            raise RuntimeFailure(f"record {info.filename!r} has a second name in the archive")
        if (twin := seen.get(info.filename.lower())) is not None:
            raise RuntimeFailure(f"torch reads its records {twin!r} and {info.filename!r} as the same one")
        seen[info.filename.lower()] = info.filename
    return found


def _check_end(file: IO[bytes]) -> None:
    length = file.seek(0, io.SEEK_END)
    file.seek(max(0, length - _END64.size - _LOCATOR.size - _END.size))
    tail = file.read()
    signature, nbytes, offset, comment = _END.unpack(tail[-_END.size :])
    if signature != b"PK\x05\x06" or comment:
        raise RuntimeFailure("it does not end like a torch archive: it has extra bytes at its end")
    end, tail = length - _END.size, tail[: -_END.size]
    if tail[-_LOCATOR.size :].startswith(b"PK\x06\x07"):
        _, at = _LOCATOR.unpack(tail[-_LOCATOR.size :])
        end -= _LOCATOR.size + _END64.size
        signature, nbytes, offset = _END64.unpack(tail[: -_LOCATOR.size])
        if signature != b"PK\x06\x06" or at != end:
            raise RuntimeFailure("the end record of its zip directory is not where torch writes it")
    if offset + nbytes != end:
        raise RuntimeFailure(
            f"it states that its zip directory begins at byte {offset}, but it begins at byte {end - nbytes}"
        )
