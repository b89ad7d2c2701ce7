"""Shared memory with several workers: registered with one, it is available in all, also in those started later."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from bf16kit.messages.errors import AlreadyExists, InvalidRequest, NotFound, Overloaded, Unavailable
from service.operations import Region
from service.peers.channel import Body, Channel
from service.peers.peer import Handler, Peer
from service.regions.table import RegionTable
from service.workers.forwarding import ForwardedRegions
from service.workers.regions import FleetRegions

REGION = Region("r", "/mem", 8, 16)


class Server:
    """A supervisor and its workers, each behind a socket, here in one process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.peers: list[Peer] = []
        self.fleet = FleetRegions(self.table(), self._ask)
        self._workers: list[Peer] = []
        self._pool = ThreadPoolExecutor(2)

    def _ask(self, kind: str, body: Mapping[str, Any], files: Sequence[int] = ()) -> dict[str, Future[Body]]:
        return {str(at): peer.ask(kind, body, files) for at, peer in enumerate(self.peers)}

    def table(self, regions: int = 2) -> RegionTable:
        return RegionTable("mem", self.directory, regions=regions)

    def start(self, *, regions: int = 2) -> ForwardedRegions:
        ours, theirs = socket.socketpair()
        handlers: dict[str, Handler] = {
            "register": lambda message: self._later(self.fleet.register, Region(**message.body)),
            "unregister": lambda message: self._later(self.fleet.unregister, message.body["name"]),
        }
        supervisor = Peer(Channel(ours), "worker", handlers, lambda: None)
        table = self.table(regions)
        worker = Peer(
            Channel(theirs),
            "the supervisor",
            {
                "adopt": lambda message: table.adopt(Region(**message.body), message.files[0]),
                "forget": lambda message: table.unregister(message.body["name"]),
            },
            lambda: None,
        )
        for peer in (supervisor, worker):
            peer.start()
        with self.fleet.lock:
            self.peers.append(supervisor)
            self.fleet.tell_all(supervisor)
        self._workers.append(worker)
        return ForwardedRegions(table, worker.ask)

    def _later(self, work: Callable[[Any], None], *given: Any) -> Future[Any]:
        return self._pool.submit(work, *given)

    def end(self, index: int) -> None:
        """Simulate the death of a worker."""
        self._workers[index].close()

    def close(self) -> None:
        for peer in (*self.peers, *self._workers):
            peer.close()
        self._pool.shutdown()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "mem").write_bytes(bytes(range(64)))
    server = Server(tmp_path)
    yield server
    server.close()


def test_a_region_is_available_in_all_workers_before_the_response(server: Server) -> None:
    one, other = server.start(), server.start()
    one.register(REGION)
    for worker in (one, other):
        assert list(worker.status("")) == [REGION]
        assert worker.lease("r", 0, 2).read() == bytes([8, 9])
    other.unregister("r")
    for worker in (one, other):
        with pytest.raises(NotFound, match="unknown shared memory region 'r'"):
            worker.lease("r", 0, 2)


def test_the_supervisors_errors_keep_their_type_and_reason(server: Server) -> None:
    one, other = server.start(), server.start()
    one.register(REGION)
    with pytest.raises(AlreadyExists, match="'r' is registered already"):
        other.register(REGION)
    with pytest.raises(InvalidRequest, match="'/none' cannot be used"):
        one.register(Region("none", "/none", 0, 8))
    other.register(Region("second", "/mem", 0, 8))
    with pytest.raises(Overloaded, match="2 shared memory regions are registered") as refused:
        one.register(Region("third", "/mem", 0, 8))
    assert refused.value.reason == "regions"
    other.unregister("")
    assert list(one.status("")) == list(other.status("")) == []


def test_a_region_that_one_worker_cannot_register_is_in_no_worker(server: Server) -> None:
    one, full = server.start(), server.start(regions=1)
    one.register(REGION)
    with pytest.raises(Overloaded):
        one.register(Region("second", "/mem", 0, 8))
    for worker in (one, full):
        until(lambda worker=worker: list(worker.status("")) == [REGION])  # type: ignore[misc]


def test_a_dead_worker_does_not_block_a_registration(server: Server) -> None:
    one, _ = server.start(), server.start()
    server.end(1)
    one.register(REGION)
    assert list(one.status("")) == [REGION]


def test_a_registration_without_a_supervisor_is_unavailable(server: Server) -> None:
    one = server.start()
    for peer in server.peers:
        peer.close()
    with pytest.raises(Unavailable):
        one.register(REGION)
    assert list(one.status("")) == []
