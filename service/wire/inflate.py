"""Decompresses requests here. gRPC would do it on the one thread that all calls share.

62 KiB can decompress to 63 MiB of zeros. 250 such requests, one second of a slow network, blocked that thread for
fifteen seconds.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from typing import Any

from bf16kit.messages.errors import InvalidRequest

_GZIP = b"\x1f\x8b"  # never the start of a message: 0x1f would have a wire type that does not exist
_ZLIB = 0x78  # with a valid second byte; in protobuf it would be field 15, which no request has
_SMALL = 64 << 10  # decompressed bytes; smaller messages need not wait for each other
_AUTO = zlib.MAX_WBITS | 32  # zlib detects which of the two formats it is


class Inflater:
    """Decompresses messages to at most ``max_bytes``, large ones one at a time.

    Two at once would take as long, and twice the memory.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._one_at_a_time = threading.Lock()

    def __call__(self, data: bytes, reserve: Callable[[int], None]) -> bytes:
        """Return ``data`` decompressed, or as it is if it is not compressed.

        ``reserve`` is called with the bytes that the request takes so far, and may raise. Raises InvalidRequest if
        ``data`` cannot be decompressed, or is too large when it is.
        """
        if not _compressed(data):
            reserve(len(data))
            return data
        inflate = zlib.decompressobj(_AUTO)
        inflated = _inflate_up_to(inflate, data, min(_SMALL, self._max_bytes + 1))
        if not inflate.eof and len(inflated) <= self._max_bytes:
            with self._one_at_a_time:
                reserve(len(data))  # others may have taken long, and the client may have left
                inflated += _inflate_up_to(inflate, inflate.unconsumed_tail, self._max_bytes + 1 - len(inflated))
        if len(inflated) > self._max_bytes:
            raise InvalidRequest(f"the request has more than {self._max_bytes} bytes once it is decompressed")
        if not inflate.eof or inflate.unused_data:
            raise InvalidRequest("the request cannot be decompressed: it is truncated, or has extra bytes at its end")
        reserve(len(inflated))
        return inflated


def _inflate_up_to(inflate: Any, data: bytes, most: int) -> bytes:
    """Decompress up to ``most`` bytes. ``most`` is at least 1: for zlib, 0 means no limit."""
    try:
        more: bytes = inflate.decompress(data, most)
    except zlib.error:
        raise InvalidRequest("the request cannot be decompressed") from None
    return more


def _compressed(data: bytes) -> bool:
    return data[:2] == _GZIP or (data[:1] == b"\x78" and len(data) > 1 and (_ZLIB << 8 | data[1]) % 31 == 0)
