"""Fetching evidence from the process that keeps it, over a real channel."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from bf16kit.messages.errors import NotFound, Unavailable
from service.peers.channel import Body, Channel
from service.peers.peer import Handler, Peer
from service.shadow import fetching
from service.shadow.fetching import EVIDENCE, fetch_evidence, send_evidence

Join = Callable[[Handler], Peer]


@pytest.fixture
def join() -> Iterator[Join]:
    """Yield a function that returns a peer whose other side handles requests for evidence."""
    peers: list[Peer] = []

    def connect(handler: Handler) -> Peer:
        ends = socket.socketpair()
        for end, name, handlers in zip(ends, ("here", "there"), ({}, {EVIDENCE: handler}), strict=True):
            peers.append(Peer(Channel(end), name, handlers, lambda: None))
            peers[-1].start()
        return peers[-2]

    yield connect
    for peer in peers:
        peer.close()


def test_large_evidence_arrives_complete(join: Join) -> None:
    asked: list[tuple[str, int]] = []

    def evidence(model: str, version: int) -> bytes:
        asked.append((model, version))
        return bytes(range(256)) * (1 << 16)

    here = join(lambda message: send_evidence(message, evidence))
    assert fetch_evidence(lambda: here, "m", 3) == bytes(range(256)) * (1 << 16)
    assert asked == [("m", 3)]


def test_each_cause_of_missing_evidence_has_its_error(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(model: str, version: int) -> bytes:
        raise NotFound("no breach yet")

    with pytest.raises(NotFound, match="no live sample has been measured"):
        fetch_evidence(lambda: None, "m", 1)
    here = join(lambda message: send_evidence(message, none))
    with pytest.raises(NotFound, match="no breach yet"):
        fetch_evidence(lambda: here, "m", 1)
    here.close()
    with pytest.raises(Unavailable):
        fetch_evidence(lambda: here, "m", 1)
    monkeypatch.setattr(fetching, "TIMEOUT_SECONDS", 0.01)
    never: Future[Body] = Future()
    silent = join(lambda message: never)
    with pytest.raises(Unavailable, match="did not answer within"):
        fetch_evidence(lambda: silent, "m", 1)
