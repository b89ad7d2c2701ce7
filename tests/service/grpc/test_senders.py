"""Senders: at most two sends at once per client, clients in turn, and whether sends wait is known."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from waiting import until

from service.grpc.senders import Senders


class Deaf:
    """Clients that read nothing until ``go`` is set."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.go = threading.Event()

    def to(self, client: str) -> Callable[[], None]:
        def send() -> None:
            self.begun.append(client)
            assert self.go.wait(30)

        return send


@pytest.fixture
def deaf() -> Iterator[Deaf]:
    deaf = Deaf()
    yield deaf
    deaf.go.set()


def test_a_client_that_does_not_read_takes_at_most_two_threads(deaf: Deaf) -> None:
    senders = Senders(3, "test")
    sent = [senders.submit("deaf", deaf.to("deaf")) for _ in range(9)]
    assert senders.submit("good", lambda: None).result(30) is None
    until(lambda: deaf.begun == ["deaf", "deaf"])
    until(lambda: senders.has_backlog)
    deaf.go.set()
    for each in sent:
        each.result(30)
    assert not senders.has_backlog
    until(lambda: senders._free == 3)
    assert not senders._busy
    senders.shutdown(wait=True)


def test_clients_take_turns(deaf: Deaf) -> None:
    senders, order = Senders(1, "test"), list[str]()
    senders.submit("first", deaf.to("first"))
    until(lambda: deaf.begun)
    sent = [
        senders.submit(client, lambda client=client: order.append(client))  # type: ignore[misc]
        for client in ("a", "a", "a", "b", "c")
    ]
    deaf.go.set()
    for each in sent:
        each.result(30)
    senders.shutdown(wait=True)
    assert order == ["a", "b", "c", "a", "a"]


def test_clients_that_have_read_before_come_first(deaf: Deaf) -> None:
    senders, order = Senders(1, "test"), list[str]()
    senders.submit("first", deaf.to("first"))
    until(lambda: deaf.begun)
    sent = [
        senders.submit(client, lambda client=client: order.append(client), reads=client > "n")  # type: ignore[misc]
        for client in ("a", "z", "b", "y")
    ]
    deaf.go.set()
    for each in sent:
        each.result(30)
    senders.shutdown(wait=True)
    assert order == ["z", "y", "a", "b"]


def test_nothing_is_sent_after_the_shutdown(deaf: Deaf) -> None:
    senders = Senders(1, "test")
    at_it, waiting = senders.submit("a", deaf.to("a")), senders.submit("b", deaf.to("b"))
    until(lambda: deaf.begun)
    senders.shutdown(wait=False)
    assert waiting.cancelled()
    assert not senders.has_backlog
    with pytest.raises(RuntimeError):
        senders.submit("c", deaf.to("c"))
    deaf.go.set()
    at_it.result(30)
    assert deaf.begun == ["a"]
