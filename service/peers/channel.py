"""Messages between the processes of one server: JSON over a socket pair, with open files.

A message is its length in bytes, eight of them, then a JSON object. Files travel as ``SCM_RIGHTS`` with the length.
Long texts travel as files too (:func:`text_file`). Values of dataclasses become JSON by :func:`to_json`. Nothing is
unpickled.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import TypeAdapter

_HEAD = struct.Struct("!Q")
_ANCILLARY = socket.CMSG_SPACE(8 * array.array("i").itemsize)  # more files than any message has
_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}  # by type: each takes a moment to make

Body = dict[str, Any]


class Channel:
    """One end of a channel. One thread at a time may send, and one receive."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, text: bytes, files: Sequence[int] = ()) -> None:
        """Send the JSON ``text`` and ``files``, which stay the caller's; block until the system has taken all.

        Raises OSError once the other end is closed.
        """
        socket.send_fds(self._end, [_HEAD.pack(len(text))], files)
        self._end.sendall(text)

    def receive(self) -> tuple[Body, list[int]] | None:
        """Return the next message and its files, which the caller must close; None once the other end is closed.

        Raises ConnectionError if this process can open no more files.
        """
        head, rights, flags, _ = self._end.recvmsg(_HEAD.size, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
        files = array.array("i", b"".join(data for *_, data in rights)).tolist()
        found: tuple[Body, list[int]] | None = None
        try:
            if flags & socket.MSG_CTRUNC:
                raise ConnectionError("files of a message were lost: too many are open here")
            text = self._exactly(*_HEAD.unpack(head)) if head else None
            if text is not None:
                found = json.loads(text), files
            return found
        finally:
            if found is None:
                close_all(files)

    def close(self) -> None:
        """Close both directions: threads that wait in :meth:`receive`, here or at the other end, see the end."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        self._end.close()

    def _exactly(self, size: int) -> bytearray | None:
        """Read ``size`` bytes; return None at the end of the stream."""
        read = bytearray(size)
        left = memoryview(read)
        while left:
            count = self._end.recv_into(left)
            if not count:
                return None
            left = left[count:]
        return read


def close_all(files: Sequence[int]) -> None:
    """Close descriptors."""
    for file in files:
        with contextlib.suppress(OSError):
            os.close(file)


@contextmanager
def text_file(text: str) -> Iterator[int]:
    """Yield the descriptor of memory that holds ``text``. Raises OSError if no descriptor is left."""
    file = os.memfd_create("bf16kit-text", os.MFD_CLOEXEC)
    try:
        with os.fdopen(file, "wb", closefd=False) as writing:
            writing.write(text.encode())
        yield file
    finally:
        os.close(file)


def read_text(file: int) -> str:
    """Return the text, whatever has been read of the file before."""
    os.lseek(file, 0, os.SEEK_SET)
    with os.fdopen(file, "rb", closefd=False) as reading:
        return reading.read().decode()


def to_json(value: object, kind: Any = None) -> Any:
    """Return a value of dataclasses as JSON, for :func:`from_json`. ``kind`` is its type, if that has parameters."""
    return _adapter(type(value) if kind is None else kind).dump_python(value, warnings=False)


def from_json(kind: Any, written: Any) -> Any:
    """Return the value of this type that :func:`to_json` wrote. It comes from a process of this server."""
    return _adapter(kind).validate_python(written)


def _adapter(kind: Any) -> TypeAdapter[Any]:
    return _ADAPTERS.get(kind) or _ADAPTERS.setdefault(kind, TypeAdapter(kind))
