"""Messages and open files between processes."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
from openfiles import no_more_files

from service.peers.channel import Body, Channel, close_all


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    ends = [Channel(end) for end in socket.socketpair()]
    yield ends[0], ends[1]
    for end in ends:
        end.close()
        end.release()


def test_messages_of_any_size_arrive_whole_and_in_order(pair: tuple[Channel, Channel]) -> None:
    bodies: list[Body] = [{"n": 1}, {"text": "é" * 3_000_000}, {}]

    def send_all() -> None:
        for body in bodies:
            pair[0].send(json.dumps(body).encode())

    sending = threading.Thread(target=send_all)
    sending.start()
    assert [pair[1].receive() for _ in bodies] == [(body, []) for body in bodies]
    sending.join()


def test_files_arrive_with_their_message_and_are_not_inheritable(pair: tuple[Channel, Channel]) -> None:
    reader, writer = os.pipe()
    pair[0].send(b'{"first": true}')
    pair[0].send(b'{"second": true}', [writer])
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
        pair[1].send(b"{}")


def test_a_truncated_message_ends_the_channel() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(struct.pack("!Q", 10) + b"{}")
        theirs.close()
        assert Channel(ours).receive() is None


def test_a_file_that_this_process_cannot_open_is_an_error(pair: tuple[Channel, Channel]) -> None:
    reader, writer = os.pipe()
    pair[0].send(b"{}", [writer])
    with no_more_files(), pytest.raises(ConnectionError, match="too many are open here"):
        pair[1].receive()
    os.close(writer)
    assert os.read(reader, 9) == b"", "nobody holds the other end any more"
    os.close(reader)
