"""Requests to one worker that concern all of them: the supervisor answers for the whole server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import Any, cast

from bf16kit.messages.errors import Unavailable
from service.contract import Registry
from service.operations import IndexEntry, Region, RegionSlice, RegistryModels, Setting, Settings, VersionStatistics
from service.peers.channel import Body, from_json
from service.regions import RegionTable

Ask = Callable[[str, Mapping[str, Any]], Future[Body]]
_TIMEOUT_SECONDS = 30.0  # these requests are quick; the supervisor gives up on a silent worker earlier


class ForwardedOperations(RegistryModels):
    """A worker's models, its control of them, and its regions: see :mod:`service.operations`.

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
    """A worker's :class:`service.operations.Regions`. Its own ``table`` follows the supervisor's."""

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
    """A worker's :class:`service.operations.Settings`. ``what`` is "logs" or "traces"."""

    def __init__(self, own: Settings, what: str, ask: Ask) -> None:
        self._own = own
        self._what = what
        self._ask = ask

    def update(self, changes: Mapping[str, Sequence[Setting]], model: str = "") -> Mapping[str, Sequence[Setting]]:
        if not changes:
            return self._own.update({}, model)
        body = {"what": self._what, "changes": dict(changes), "model": model}
        return cast("Mapping[str, Sequence[Setting]]", _result(self._ask("settings", body))["settings"])


def _result(future: Future[Body]) -> Body:
    try:
        return future.result(_TIMEOUT_SECONDS)
    except TimeoutError:
        raise Unavailable("the server's supervisor has not answered in time; try again") from None
