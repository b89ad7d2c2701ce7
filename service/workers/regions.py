"""Shared memory that clients register with one worker and use with all of them: the supervisor's side.

The supervisor's table is authoritative. It opens the clients' files and sends them to all workers. A worker that
restarts gets all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict

from service.operations import Region
from service.peers.channel import Body
from service.peers.peer import Peer, answers
from service.regions import RegionTable

Ask = Callable[..., Mapping[str, Future[Body]]]  # see Fleet.ask


class FleetRegions:
    """The registered regions of all workers. Each method returns when every worker has followed."""

    def __init__(self, table: RegionTable, ask: Ask) -> None:
        self.lock = threading.Lock()  # held during a change and its messages: each worker gets the changes in order
        self._table = table
        self._ask = ask

    def tell_all(self, peer: Peer) -> None:
        """Send all regions to a worker that has just started. The caller has held the lock since the start."""
        for region in self._table.status(""):
            peer.tell("adopt", asdict(region), [self._table.descriptor(region.name)])

    def register(self, region: Region) -> None:
        """Register a region in all workers, or in none. Raises as :meth:`service.operations.Regions.register` does."""
        with self.lock:
            self._table.register(region)
            pending = self._ask("adopt", asdict(region), [self._table.descriptor(region.name)])
        try:
            answers(pending)
        except BaseException:
            self._forget(region.name)
            raise

    def unregister(self, name: str) -> None:
        """Forget a region in all workers, or all regions for an empty name."""
        answers(self._forget(name))

    def _forget(self, name: str) -> Mapping[str, Future[Body]]:
        with self.lock:
            self._table.unregister(name)
            return self._ask("forget", {"name": name})
