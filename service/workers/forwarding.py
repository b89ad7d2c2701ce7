"""Requests to one worker that concern all: what the worker forwards, and how the supervisor answers for all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import Any, cast

from bf16kit.messages.errors import Unavailable
from bf16kit.service.contract import Registry
from bf16kit.service.operations import (
    IndexEntry,
    Region,
    RegionSlice,
    RegistryModels,
    Setting,
    Settings,
    VersionStatistics,
)
from bf16kit.service.peers.channel import Body, from_json
from bf16kit.service.peers.peer import Peer, answers
from bf16kit.service.regions import RegionTable

Ask = Callable[[str, Mapping[str, Any]], Future[Body]]
_TIMEOUT_SECONDS = 30.0  # these requests are quick; the supervisor gives up on a silent worker earlier


class ForwardedOperations(RegistryModels):
    """A worker's models, its control of them, and its regions: see :mod:`bf16kit.service.operations`.

    The models are this worker's own, their statistics the whole server's.
    """

    def __init__(self, registry: Registry, ask: Ask) -> None:
        super().__init__(registry)
        self._ask = ask

    def index(self) -> Sequence[IndexEntry]:
        return [IndexEntry(*line) for line in _result(self._ask("index", {}))["lines"]]

    def statistics(self, name: str, version: str) -> Sequence[VersionStatistics]:
        found = super().statistics(name, version)
        answer = _result(self._ask("statistics", {}))["statistics"]
        total = {(each.name, each.version): each for each in from_json(tuple[VersionStatistics, ...], answer)}
        return [replace(total.get((each.name, each.version), each), device=each.device) for each in found]

    def load(self, name: str, config: str | None = None) -> Future[None]:
        return cast("Future[None]", self._ask("load", {"name": name, "config": config}))

    def unload(self, name: str) -> Future[None]:
        return cast("Future[None]", self._ask("unload", {"name": name}))


class ForwardedRegions:
    """A worker's :class:`bf16kit.service.operations.Regions`. Its own ``table`` follows the supervisor's."""

    def __init__(self, table: RegionTable, ask: Ask) -> None:
        self._table = table
        self._ask = ask

    def register(self, region: Region) -> None:
        _result(self._ask("register", asdict(region)))

    def unregister(self, name: str) -> None:
        _result(self._ask("unregister", {"name": name}))

    def status(self, name: str) -> Sequence[Region]:
        return self._table.status(name)

    def lease(self, name: str, offset: int, byte_size: int) -> RegionSlice:
        return self._table.lease(name, offset, byte_size)


class ForwardedSettings:
    """A worker's :class:`bf16kit.service.operations.Settings`. ``what`` is "logs" or "traces"."""

    def __init__(self, own: Settings, what: str, ask: Ask) -> None:
        self._own = own
        self._what = what
        self._ask = ask

    def update(self, changes: Mapping[str, Sequence[Setting]], model: str = "") -> Mapping[str, Sequence[Setting]]:
        if not changes:
            return self._own.update({}, model)
        body = {"what": self._what, "changes": dict(changes), "model": model}
        return cast("Mapping[str, Sequence[Setting]]", _result(self._ask("settings", body))["settings"])


class FleetRegions:
    """The supervisor's side: the regions that clients register with one worker and use with all of them.

    ``table`` is authoritative. It opens the clients' files, which are sent to all workers, also to those that start
    later. Each method returns when every worker has followed. ``ask`` is
    :meth:`bf16kit.service.workers.fleet.Fleet.ask`.
    """

    def __init__(self, table: RegionTable, ask: Callable[..., Mapping[str, Future[Body]]]) -> None:
        self.lock = threading.Lock()  # held during a change and its messages: each worker gets the changes in order
        self._table = table
        self._ask = ask

    def tell_all(self, peer: Peer) -> None:
        """Send all regions to a worker that has just started. The caller has held the lock since the start."""
        for region in self._table.status(""):
            peer.tell("adopt", asdict(region), [self._table.descriptor(region.name)])

    def register(self, region: Region) -> None:
        """Register a region in all workers or none. Raises as :meth:`bf16kit.service.operations.Regions.register`."""
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


def _result(future: Future[Body]) -> Body:
    try:
        return future.result(_TIMEOUT_SECONDS)
    except TimeoutError:
        raise Unavailable("the server's supervisor has not answered in time; try again") from None
