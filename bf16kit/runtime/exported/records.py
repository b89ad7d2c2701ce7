"""The zip records of a torch.export archive: where each lies in the file, checked to be as torch writes it."""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass
from typing import Any

from bf16kit.messages.errors import RuntimeFailure

_NAME_LENGTH, _EXTRA_LENGTH, _LOCAL_HEADER = 26, 28, 30  # of a record's local header in a zip file
_ONE_FILE = "serialized_exported_program.json"


@dataclass(frozen=True, slots=True)
class Record:
    """Position of a record's bytes in the archive, and their CRC-32."""

    offset: int
    nbytes: int
    crc: int


def read_records(data: memoryview) -> dict[str, Record]:
    """Return the archive's records by torch's name for them, without the folder that contains them all.

    Raises :class:`RuntimeFailure` for what torch would not write, and the zip library's errors for damage.
    """
    found: dict[str, Record] = {}
    with zipfile.ZipFile(io.BufferedReader(_View(data))) as archive:
        infos = archive.infolist()
    if any(info.filename.rpartition("/")[2] == _ONE_FILE for info in infos):
        raise RuntimeFailure(
            "is of the format that torch.export.save wrote before torch 2.8: load it with the torch that wrote it,"
            " and save it again with torch 2.8 or newer"
        )
    roots = {info.filename.partition("/")[0] for info in infos}
    if len(roots) != 1:
        raise RuntimeFailure(f"has {len(roots)} folders at its top, expected one")
    for info in infos:
        name = info.filename.partition("/")[2]
        if name in found:
            raise RuntimeFailure(f"has two records called {name!r}")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise RuntimeFailure(f"record {name!r} is compressed or encrypted, which torch never does")
        if info.compress_size != info.file_size:
            raise RuntimeFailure(f"record {name!r} has {info.file_size} bytes, but {info.compress_size} are stored")
        found[name] = located(info, data)
    return found


class _View(io.RawIOBase):
    """A read-only file over memory; `io.BytesIO` would copy it."""

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self._data, self._at = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        if start + offset < 0:
            raise OSError("a position before the beginning")  # like a real file, as zipfile expects
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        found = self._data[self._at : self._at + len(buffer)]
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)


def located(info: zipfile.ZipInfo, data: memoryview) -> Record:
    """Return where the record ``info`` lies in ``data``, the whole file; :class:`RuntimeFailure` if it does not."""
    header = data[info.header_offset : info.header_offset + _LOCAL_HEADER]
    if bytes(header[:4]) != b"PK\x03\x04":
        raise RuntimeFailure(f"record {info.filename!r} does not begin where the archive says")
    named, extra = (int.from_bytes(header[at : at + 2], "little") for at in (_NAME_LENGTH, _EXTRA_LENGTH))
    name = bytes(data[info.header_offset + _LOCAL_HEADER :][:named])
    if name not in (info.orig_filename.encode(), info.orig_filename.encode("cp437", "replace")):
        raise RuntimeFailure(f"record {info.filename!r} has another name in its own header")
    offset = info.header_offset + _LOCAL_HEADER + named + extra
    if offset + info.file_size > len(data):
        raise RuntimeFailure(f"record {info.filename!r} ends beyond the end of the file")
    return Record(offset, info.file_size, info.CRC)
