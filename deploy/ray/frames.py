"""Frames between a replica and Ray's proxy: a response or a status, as bytes.

Ray can pass on a status only as an exception with its traceback, or in an object of its own. A frame needs neither. Its
first byte says what the rest is.
"""

from __future__ import annotations

from grpc import StatusCode

from service.grpc.status import Status

_RESPONSE, _STATUS = b"\x00", b"\x01"
_CODES = {int(code.value[0]): code for code in StatusCode}


class Frame:
    """Bytes as Ray expects them from a gRPC replica: an object with ``SerializeToString``."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = data

    @classmethod
    def of(cls, response: bytes | Status) -> Frame:
        if isinstance(response, bytes):
            return cls(_RESPONSE + response)
        code: int = response.code.value[0]
        return cls(_STATUS + bytes((code,)) + response.details.encode())

    def SerializeToString(self) -> bytes:  # noqa: N802 -- protobuf's name, which Ray calls
        return self._data


def parse_frame(data: bytes) -> bytes | Status:
    """Return what :meth:`Frame.of` was given; ValueError for bytes that are no frame."""
    if data[:1] == _RESPONSE:
        return data[1:]
    if data[:1] == _STATUS and len(data) > 1 and data[1] in _CODES:
        return Status(_CODES[data[1]], data[2:].decode("utf-8", "replace"))
    raise ValueError(f"{data[:8]!r} is not the start of a frame")
