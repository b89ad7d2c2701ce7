"""Requests to one worker that concern all of them: forwarded to the supervisor, which answers for the whole server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from bf16kit.messages.errors import Unavailable
from service.contract import Registry
from service.models.plan import complete
from service.operations import IndexEntry, RegistryModels, Setting, Settings, VersionStatistics
from service.peers.channel import Body
from service.workers.statistics import from_json

Ask = Callable[[str, Mapping[str, Any]], Future[Body]]
_TIMEOUT_SECONDS = 30.0  # these requests are quick; the supervisor gives up on a silent worker earlier


class ModelsProxy(RegistryModels):
    """The models are this worker's own, the statistics the whole server's."""

    def __init__(self, registry: Registry, ask: Ask) -> None:
        super().__init__(registry)
        self._ask = ask

    def index(self) -> Sequence[IndexEntry]:
        return [IndexEntry(*line) for line in _result(self._ask("index", {}))["lines"]]

    def statistics(self, name: str, version: str) -> Sequence[VersionStatistics]:
        found = super().statistics(name, version)
        merged = from_json(_result(self._ask("statistics", {}))["statistics"])
        return [replace(each, snapshot=merged.get((each.name, each.version), each.snapshot)) for each in found]


class ControlProxy:
    """A worker's :class:`service.operations.ModelControl`."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def load(self, name: str, config: str | None = None) -> Future[None]:
        return _without_result(self._ask("load", {"name": name, "config": config}))

    def unload(self, name: str) -> Future[None]:
        return _without_result(self._ask("unload", {"name": name}))


class SettingsProxy:
    """A worker's :class:`service.operations.Settings`. ``what`` is "logs" or "traces"."""

    def __init__(self, own: Settings, what: str, ask: Ask) -> None:
        self._own = own
        self._what = what
        self._ask = ask

    def update(self, changes: Mapping[str, Sequence[Setting]], model: str = "") -> Mapping[str, Sequence[Setting]]:
        if not changes:
            return self._own.update({}, model)
        values_by_name = {name: list(values) for name, values in changes.items()}
        answer = _result(self._ask("settings", {"what": self._what, "changes": values_by_name, "model": model}))
        return settings_from_json(answer["settings"])


def settings_from_json(fields: Mapping[str, Sequence[Setting]]) -> dict[str, tuple[Setting, ...]]:
    """Convert settings that came as JSON."""
    return {name: tuple(values) for name, values in fields.items()}


def _result(future: Future[Body]) -> Body:
    try:
        return future.result(_TIMEOUT_SECONDS)
    except TimeoutError:
        raise Unavailable("the server's supervisor has not answered in time; try again") from None


def _without_result(future: Future[Body]) -> Future[None]:
    """Return a future with the same end but without a result."""
    done: Future[None] = Future()

    future.add_done_callback(lambda answered: complete([done], answered.exception()))
    return done
