"""Compressed requests are restored exactly, and have the size limit of other requests."""

from __future__ import annotations

import gzip
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from loopback import infer_request

from bf16kit.messages.errors import Cancelled, InvalidRequest, Overloaded
from service.wire.inflate import Inflater

MESSAGE = infer_request(x=np.zeros((4, 1000), np.float32)).SerializeToString()


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zlib.compress, lambda data: zlib.compress(data, 9)])
def test_a_message_is_restored_and_counted_with_its_full_size(compress: type[bytes]) -> None:
    held: list[int] = []
    assert Inflater(1 << 20)(compress(MESSAGE), held.append) == MESSAGE
    assert held[-1] == len(MESSAGE)


def test_a_large_request_that_has_ended_before_its_turn_is_not_decompressed() -> None:
    def over(nbytes: int) -> None:
        held.append(nbytes)
        raise Cancelled("the client left")

    held: list[int] = []
    data = gzip.compress(bytes(1 << 20))
    with pytest.raises(Cancelled):
        Inflater(1 << 20)(data, over)
    assert held == [len(data)]


def test_a_small_request_does_not_wait_for_a_large_one() -> None:
    inflate, small = Inflater(1 << 20), bytes(64)

    def meanwhile(nbytes: int) -> None:  # the large request is being decompressed
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(inflate, gzip.compress(small), lambda _: None).result(timeout=20) == small

    inflate(gzip.compress(bytes(1 << 20)), meanwhile)


@pytest.mark.parametrize("data", [b"", b"\x0a", b"\x78", b"x0", b"\x08\x1f\x8b"])
def test_an_uncompressed_request_is_unchanged(data: bytes) -> None:
    assert Inflater(1 << 20)(data, lambda nbytes: None) == data


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress])
def test_a_request_that_is_too_large_once_decompressed_is_rejected(compress: type[bytes]) -> None:
    inflate = Inflater(len(MESSAGE))
    assert inflate(compress(MESSAGE), lambda nbytes: None) == MESSAGE
    with pytest.raises(InvalidRequest, match=f"more than {len(MESSAGE)} bytes once it is decompressed"):
        inflate(compress(MESSAGE + b"\0" * (64 << 20)), lambda nbytes: None)


@pytest.mark.parametrize("damage", [lambda z: z[:-5], lambda z: z + b"\0", lambda z: z[:20] + b"\xff\xff" + z[22:]])
def test_a_request_that_cannot_be_decompressed_is_rejected(damage: type[bytes]) -> None:
    with pytest.raises(InvalidRequest, match="cannot be decompressed"):
        Inflater(1 << 20)(damage(gzip.compress(MESSAGE)), lambda nbytes: None)


def test_a_request_without_room_is_overloaded_and_the_next_one_succeeds() -> None:
    inflate = Inflater(1 << 20)

    def full(nbytes: int) -> None:
        raise Overloaded("full")

    with pytest.raises(Overloaded):
        inflate(gzip.compress(MESSAGE), full)
    assert inflate(gzip.compress(MESSAGE), lambda nbytes: None) == MESSAGE
