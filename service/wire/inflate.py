"""Compressed requests, decompressed here: gRPC would do so on the one thread that all calls share.

62 KiB are 63 MiB of zeros: 250 such requests, a second's worth of a slow network, kept that thread from everybody else
for fifteen seconds.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable

from bf16kit.errors import InvalidRequest

_GZIP = b"\x1f\x8b"  # no message begins so: 0x1f would be a field of a wire type that there is not
_ZLIB = 0x78  # with the right byte behind it. In protobuf: field 15, which no request has, before those that it has
_AUTO = zlib.MAX_WBITS | 32  # of the two, whichever it is


class Inflater:
    """Decompresses messages to at most ``max_bytes``, one at a time: what two do at once takes as long, and twice the
    memory."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._one_at_a_time = threading.Lock()

    def __call__(self, data: bytes, hold: Callable[[int], None]) -> bytes:
        """``data`` as it was before it was compressed, if it was. ``hold`` is told its size then, and may raise.

        Raises InvalidRequest for what cannot be decompressed, or is too large then.
        """
        if not _compressed(data):
            hold(len(data))
            return data
        with self._one_at_a_time:
            hold(len(data))  # again: others may have taken long
            inflated = self._inflated(data)
            hold(len(inflated) - len(data))
            return inflated

    def _inflated(self, data: bytes) -> bytes:
        inflate = zlib.decompressobj(_AUTO)
        try:
            inflated = inflate.decompress(data, self._max_bytes + 1)
        except zlib.error:
            raise InvalidRequest("the request cannot be decompressed") from None
        if len(inflated) > self._max_bytes:
            raise InvalidRequest(f"the request has more than {self._max_bytes} bytes once it is decompressed")
        if not inflate.eof or inflate.unused_data:
            raise InvalidRequest("the request cannot be decompressed: it is broken off, or goes on behind its end")
        return inflated


def _compressed(data: bytes) -> bool:
    return data[:2] == _GZIP or (data[:1] == b"\x78" and len(data) > 1 and (_ZLIB << 8 | data[1]) % 31 == 0)
