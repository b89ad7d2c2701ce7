"""Compressed requests, decompressed here: gRPC would do so on the one thread that all calls share.

62 KiB are 63 MiB of zeros: 250 such requests, a second's worth of a slow network, kept that thread from everybody else
for fifteen seconds.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from typing import Any

from bf16kit.errors import InvalidRequest

_GZIP = b"\x1f\x8b"  # no message begins so: 0x1f would be a field of a wire type that there is not
_ZLIB = 0x78  # with the right byte behind it. In protobuf: field 15, which no request has, before those that it has
_SMALL = 64 << 10  # bytes, decompressed: nobody waits for another's
_AUTO = zlib.MAX_WBITS | 32  # of the two, whichever it is


class Inflater:
    """Decompresses messages to at most ``max_bytes``; large ones one at a time: what two do at once takes as long, and
    twice the memory."""

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
        inflate = zlib.decompressobj(_AUTO)
        inflated = _more(inflate, data, min(_SMALL, self._max_bytes + 1))
        if not inflate.eof and len(inflated) <= self._max_bytes:
            with self._one_at_a_time:
                hold(len(data))  # others may have taken long, and the client may have left
                inflated += _more(inflate, inflate.unconsumed_tail, self._max_bytes + 1 - len(inflated))
        if len(inflated) > self._max_bytes:
            raise InvalidRequest(f"the request has more than {self._max_bytes} bytes once it is decompressed")
        if not inflate.eof or inflate.unused_data:
            raise InvalidRequest("the request cannot be decompressed: it is broken off, or goes on behind its end")
        hold(len(inflated))
        return inflated


def _more(inflate: Any, data: bytes, most: int) -> bytes:
    """``most`` bytes or fewer, and one at least: zlib takes 0 for no limit."""
    try:
        more: bytes = inflate.decompress(data, most)
    except zlib.error:
        raise InvalidRequest("the request cannot be decompressed") from None
    return more


def _compressed(data: bytes) -> bool:
    return data[:2] == _GZIP or (data[:1] == b"\x78" and len(data) > 1 and (_ZLIB << 8 | data[1]) % 31 == 0)
