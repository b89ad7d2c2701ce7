"""Messages between the processes of one server: JSON of limited size over a socket pair, with open files.

A message is its length in bytes and its number of files, four bytes each, then a JSON object. Files travel as
``SCM_RIGHTS``. Long texts travel as files too (:func:`text_file`): no limit of messages applies to them. Values of
dataclasses become JSON by :func:`to_json`. Nothing is unpickled.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import TypeAdapter

from bf16kit.messages.errors import RuntimeFailure

LONGEST = 64 << 20  # bytes of one message; tensors travel in files
MOST_FILES = 64
_HEAD = struct.Struct("!II")
_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}  # by type: each takes a moment to make
_ANCILLARY = socket.CMSG_SPACE(MOST_FILES * array.array("i").itemsize)

Body = dict[str, Any]


class MessageTooLarge(RuntimeFailure):
    """A message is over the limits, and was not sent."""


class Channel:
    """One end of a channel. One thread may send while another receives; two must not do the same."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, text: bytes, files: Sequence[int] = ()) -> None:
        """Send ``text``, as :func:`written` returns it; block until the system has taken all of it.

        ``files`` are descriptors, which stay the caller's. Raises OSError once the other end is closed.
        """
        head = _HEAD.pack(len(text), len(files))
        # The system attaches files to the first byte sent with them, so they go with the head.
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
        sent = self._end.sendmsg([head, text], rights)
        for part in (head, text):
            self._end.sendall(memoryview(part)[sent:])
            sent = max(0, sent - len(part))

    def receive(self) -> tuple[Body, list[int]] | None:
        """Return the next message and its files, which the caller must close; None once the other end is closed.

        Raises ConnectionError for bytes that are no message.
        """
        files: list[int] = []
        try:
            head = self._exactly(_HEAD.size, files)
            if head is None:
                return None
            length, count = _HEAD.unpack(head)
            if length > LONGEST or count > MOST_FILES:
                raise ConnectionError(f"a message of {length} bytes and {count} files is not from this server")
            text = self._exactly(length, files)
            if text is None:
                return None
            body = json.loads(text)
            if not isinstance(body, dict) or len(files) != count:
                raise ConnectionError(f"a message with {len(files)} of {count} files is not from this server")
        except BaseException as error:
            close_all(files)
            if isinstance(error, (ValueError, OSError)) and not isinstance(error, ConnectionError):
                raise ConnectionError(f"not a message: {error}") from None
            raise
        return body, files

    def close(self) -> None:
        """Close both directions: threads that wait in :meth:`receive`, here or at the other end, see the end."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Close the descriptor, once no thread uses it any more."""
        self._end.close()

    def _exactly(self, size: int, files: list[int]) -> bytes | None:
        """Read ``size`` bytes, and append the files that came with them; return None at the end of the stream."""
        read = bytearray()
        while len(read) < size:
            part, rights, flags, _ = self._end.recvmsg(size - len(read), _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
            for level, kind, data in rights:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    numbers = array.array("i")
                    numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
                    files += numbers
            if flags & socket.MSG_CTRUNC:
                raise ConnectionError("files of a message were lost: too many are open here")
            if not part:
                return None
            read += part
        return bytes(read)


def written(body: Mapping[str, Any], files: Sequence[int] = ()) -> bytes:
    """Return the text of a message to be sent with these files.

    Raises MessageTooLarge if there is too much of either.
    """
    text = json.dumps(body, separators=(",", ":")).encode()
    if len(text) > LONGEST or len(files) > MOST_FILES:
        limits = f"at most {LONGEST} bytes and {MOST_FILES} files are allowed"
        raise MessageTooLarge(f"a message of {len(text)} bytes and {len(files)} files; {limits}")
    return text


def close_all(files: Sequence[int]) -> None:
    """Close the descriptors of a message."""
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
