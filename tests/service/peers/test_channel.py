"""Messages and open files between processes."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from service.peers.channel import LONGEST, MOST_FILES, Body, Channel, MessageTooLarge, close_all, written

Pair = tuple[Channel, socket.socket]


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    ends = [Channel(end) for end in socket.socketpair()]
    yield ends[0], ends[1]
    for end in ends:
        end.close()
        end.release()


@pytest.fixture
def raw() -> Iterator[Pair]:
    """Yield a channel, and its other end as a plain socket."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Channel(ours), theirs


def test_messages_of_any_size_arrive_whole_and_in_order(pair: tuple[Channel, Channel]) -> None:
    bodies: list[Body] = [{"n": 1}, {"text": "é" * 3_000_000}, {}]

    def send_all() -> None:
        for body in bodies:
            pair[0].send(written(body))

    sending = threading.Thread(target=send_all)
    sending.start()
    assert [pair[1].receive() for _ in bodies] == [(body, []) for body in bodies]
    sending.join()


def test_files_arrive_with_their_message_and_are_not_inheritable(pair: tuple[Channel, Channel]) -> None:
    reader, writer = os.pipe()
    pair[0].send(written({"first": True}))
    pair[0].send(written({"second": True}, [writer]), [writer])
    os.close(writer)
    assert pair[1].receive() == ({"first": True}, [])
    received = pair[1].receive()
    assert received is not None
    body, files = received
    assert body == {"second": True}
    assert not os.get_inheritable(files[0])
    os.write(files[0], b"here")
    assert os.read(reader, 9) == b"here"
    close_all(files)
    assert os.read(reader, 9) == b"", "nobody holds the other end any more"
    os.close(reader)


def test_closing_a_channel_ends_the_waiting_receivers_on_both_sides(pair: tuple[Channel, Channel]) -> None:
    received: list[object] = []
    waiting = [threading.Thread(target=lambda end=end: received.append(end.receive())) for end in pair]
    for thread in waiting:
        thread.start()
    pair[0].close()
    for thread in waiting:
        thread.join(20)
    assert received == [None, None]
    with pytest.raises(OSError, match="pipe"):
        pair[1].send(written({}))


def test_a_truncated_message_ends_the_channel(raw: Pair) -> None:
    raw[1].sendall(struct.pack("!II", 10, 0) + b"{}")
    raw[1].close()
    assert raw[0].receive() is None


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (struct.pack("!II", LONGEST + 1, 0), "is not from this server"),
        (struct.pack("!II", 2, MOST_FILES + 1), "is not from this server"),
        (struct.pack("!II", 2, 0) + b"[]", "is not from this server"),
        (struct.pack("!II", 2, 1) + b"{}", "0 of 1 files"),
        (struct.pack("!II", 3, 0) + b"{]}", "not a message"),
        (struct.pack("!II", 1, 0) + b"\xff", "not a message"),
    ],
)
def test_an_invalid_message_is_rejected_before_memory_is_allocated_for_it(raw: Pair, sent: bytes, why: str) -> None:
    raw[1].sendall(sent)
    with pytest.raises(ConnectionError, match=why):
        raw[0].receive()


def test_a_message_that_is_too_long_for_the_receiver_is_an_error() -> None:
    with pytest.raises(MessageTooLarge, match="are allowed"):
        written({"text": "x" * LONGEST})
    with pytest.raises(MessageTooLarge, match="are allowed"):
        written({}, [0] * (MOST_FILES + 1))
