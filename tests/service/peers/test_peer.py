"""Two peers that exchange messages, requests and open files; here both are in one process."""

import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from openfiles import no_more_files
from waiting import until

from bf16kit.messages.errors import Bf16kitError, InvalidRequest, NotFound, RuntimeFailure, Unavailable
from bf16kit.service.peers.channel import Body, Channel, close_all
from bf16kit.service.peers.peer import Handler, Message, Peer

Connect = Callable[[Mapping[str, Handler]], Peer]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Yield a function that returns a requesting peer, whose other end has the given handlers."""
    peers: list[Peer] = []

    def begin(handlers: Mapping[str, Handler]) -> Peer:
        ours, theirs = socket.socketpair()
        peers.append(Peer(Channel(ours), "the other", {}, lambda: None))
        peers.append(Peer(Channel(theirs), "the one", handlers, lambda: None))
        for peer in peers[-2:]:
            peer.start()
        return peers[-2]

    yield begin
    for peer in peers:
        peer.close()


def test_each_request_gets_its_own_response_at_once_or_later(connect: Connect) -> None:
    later: Future[Body] = Future()
    peer = connect({"now": lambda message: {"was": message.body["x"]}, "later": lambda message: later})
    slow, fast = peer.ask("later"), peer.ask("now", {"x": 3})
    assert fast.result(20) == {"was": 3}
    assert not slow.done()
    later.set_result({"done": True})
    assert slow.result(20) == {"done": True}


def test_messages_are_handled_in_order(connect: Connect) -> None:
    heard: list[int] = []
    peer = connect({"note": lambda message: heard.append(message.body["n"])})
    for n in range(500):
        peer.tell("note", {"n": n})
    until(lambda: len(heard) == 500)
    assert heard == list(range(500))


@pytest.mark.parametrize(
    ("raised", "seen", "text"),
    [
        (NotFound("unknown model 'x'"), NotFound, "unknown model 'x'"),
        (InvalidRequest("no"), InvalidRequest, "no"),
        (Unavailable("later", "draining"), Unavailable, "later"),
        (ZeroDivisionError("secret"), RuntimeFailure, "an unexpected error; the server's log has it"),
    ],
)
def test_an_error_keeps_its_class_and_a_bug_arrives_without_its_text(
    connect: Connect, raised: Exception, seen: type[Bf16kitError], text: str
) -> None:
    def fail(message: Message) -> None:
        raise raised

    failed: Future[Any] = Future()
    failed.set_exception(raised)
    peer = connect({"now": fail, "later": lambda message: failed})
    for kind in ("now", "later"):
        error = peer.ask(kind).exception(20)
        assert type(error) is seen
        assert str(error) == text
        assert getattr(error, "reason", "") == getattr(raised, "reason", "")


def test_a_request_without_a_handler_fails_and_the_next_gets_its_response(connect: Connect) -> None:
    peer = connect({"known": lambda message: None})
    assert isinstance(peer.ask("other").exception(20), Unavailable)
    assert peer.ask("known").result(20) == {}


def test_a_request_whose_file_cannot_be_duplicated_fails_and_the_next_succeeds(connect: Connect) -> None:
    peer = connect({"take": lambda message: {"files": len(message.files)}})
    assert peer.ask("take").result(20) == {"files": 0}, "all that is opened once is open"
    with Path(os.devnull).open() as file:
        with no_more_files():
            assert isinstance(peer.ask("take", {}, [file.fileno()]).exception(20), OSError)
        assert peer.ask("take", {}, [file.fileno()]).result(20) == {"files": 1}


def test_files_stay_open_at_the_sender_and_are_closed_at_the_receiver(connect: Connect) -> None:
    kept: list[int] = []
    peer = connect({"take": lambda message: kept.append(os.dup(message.files[0])), "done": lambda message: None})
    reader, writer = os.pipe()
    peer.tell("take", {}, [writer])
    peer.ask("done").result(20)
    os.write(writer, b"mine")  # still open here
    os.close(writer)
    os.close(kept[0])
    assert os.read(reader, 9) == b"mine"
    assert os.read(reader, 9) == b"", "no copy was left open on the way"
    os.close(reader)


@pytest.mark.parametrize(("size", "most"), [(100, 5_000), (8 << 20, 20)])
def test_a_peer_that_reads_nothing_is_given_up_and_never_waited_for(size: int, most: int) -> None:
    """Both the number of its waiting messages and their bytes are limited."""
    ours, theirs = socket.socketpair()
    with theirs:
        over = threading.Event()
        peer = Peer(Channel(ours), "the deaf one", {}, over.set)
        peer.start()
        for _ in range(most):
            peer.tell("note", {"text": "x" * size})
        assert over.wait(20)


def test_sent_messages_make_room_for_more(connect: Connect) -> None:
    """The test sends more bytes than may wait at once, one message after another."""
    peer = connect({"measure": lambda message: {"size": len(message.body["text"])}})
    for _ in range(20):
        assert peer.ask("measure", {"text": "x" * (8 << 20)}).result(20) == {"size": 8 << 20}


def test_a_single_message_may_be_larger_than_all_that_may_wait(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bf16kit.service.peers.peer.MOST_WAITING", 1)
    peer = connect({"measure": lambda message: {"size": len(message.body["text"])}})
    assert peer.ask("measure", {"text": "x" * 100_000}).result(20) == {"size": 100_000}


def test_requests_of_a_closed_peer_fail_on_its_own_thread(connect: Connect) -> None:
    """Whoever closes it may hold a lock that a request's callback takes, and take it in another order."""
    never: Future[Body] = Future()
    peer, failed = connect({"never": lambda message: never}), list[str]()
    asked = peer.ask("never")
    asked.add_done_callback(lambda done: failed.append(threading.current_thread().name))
    peer.close()
    assert isinstance(asked.exception(20), Unavailable)
    until(lambda: failed)
    assert failed == ["the other-reader"]
    assert isinstance(peer.ask("never").exception(20), Unavailable), "and so does whoever asks later"
    peer.tell("never")


# --- the channel below ------------------------------------------------------------------------------------------------


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
