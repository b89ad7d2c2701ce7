"""Shared memory that clients register with one worker and use with all of them.

The supervisor's table is authoritative. It opens the clients' files and sends them to all workers. A worker that
restarts gets all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from bf16kit.messages.errors import Unavailable
from service.operations import Region
from service.peers.channel import Body
from service.peers.peer import Handler, Message, Peer
from service.regions.table import RegionSlice, RegionTable

_TIMEOUT_SECONDS = 10.0  # for all workers to answer: each opens a file


class FleetRegions:
    """The supervisor's side. ``peers`` returns the running workers."""

    def __init__(self, table: RegionTable, peers: Callable[[], Sequence[Peer]]) -> None:
        self.lock = threading.Lock()  # held during a change and its messages: each worker gets the changes in order
        self._table = table
        self._peers = peers

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The handlers of workers' requests."""
        return {"register": self._register, "unregister": self._unregister}

    def tell_all(self, peer: Peer) -> None:
        """Send all regions to a worker that has just started. The caller has held the lock since the start."""
        for region in self._table.status(""):
            peer.tell("adopt", asdict(region), [self._table.descriptor(region.name)])

    def _register(self, message: Message) -> Future[Body]:
        region = Region(**message.body)
        with self.lock:
            self._table.register(region)
            files = [self._table.descriptor(region.name)]
            pending = [peer.ask("adopt", message.body, files) for peer in self._peers()]
        return _gathered(pending, lambda: self._forget(region.name))

    def _unregister(self, message: Message) -> Future[Body]:
        return _gathered(self._forget(message.body["name"]))

    def _forget(self, name: str) -> list[Future[Body]]:
        with self.lock:
            self._table.unregister(name)
            return [peer.ask("forget", {"name": name}) for peer in self._peers()]


class WorkerRegions:
    """A worker's :class:`service.operations.Regions`. ``ask`` sends a request to the supervisor."""

    def __init__(self, table: RegionTable, ask: Callable[[str, Mapping[str, Any]], Future[Body]]) -> None:
        self._table = table
        self._ask = ask

    def register(self, region: Region) -> None:
        self._wait("register", asdict(region))

    def unregister(self, name: str) -> None:
        self._wait("unregister", {"name": name})

    def status(self, name: str) -> Sequence[Region]:
        return self._table.status(name)

    def lease(self, name: str, offset: int, byte_size: int) -> RegionSlice:
        return self._table.lease(name, offset, byte_size)

    def adopt(self, message: Message) -> None:
        """Add a region that the supervisor registered, with the file in its message."""
        self._table.adopt(Region(**message.body), message.files[0])

    def forget(self, message: Message) -> None:
        """Remove a region that the supervisor unregistered."""
        self._table.unregister(message.body["name"])

    def _wait(self, kind: str, body: Mapping[str, Any]) -> None:
        try:
            self._ask(kind, body).result(_TIMEOUT_SECONDS)
        except TimeoutError:
            raise Unavailable("some processes of this server do not answer; try again") from None


def _gathered(pending: Sequence[Future[Body]], undo: Callable[[], object] = lambda: None) -> Future[Body]:
    """Return a future that ends when all of ``pending`` have, with the first error, after ``undo``.

    Errors of workers that ended do not count: their successors get the whole state.
    """
    done: Future[Body] = Future()
    lock, left = threading.Lock(), len(pending)

    def finish() -> None:
        errors = [error for each in pending if (error := each.exception()) and not isinstance(error, Unavailable)]
        if errors:
            undo()
            done.set_exception(errors[0])
        else:
            done.set_result({})

    def count(each: Future[Body]) -> None:
        nonlocal left
        with lock:
            left -= 1
            over = not left
        if over:
            finish()

    if not pending:
        finish()
    for each in pending:
        each.add_done_callback(count)
    return done
