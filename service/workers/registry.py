"""A worker's registry: runs its own models, and reports the readiness of the whole server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from service.contract import Model, Registry, Slot, State
from service.request import Observation
from service.workers.view import View


class LatestView:
    """The newest view of the whole server, as the supervisor sent it, so that reading it costs no message."""

    def __init__(self) -> None:
        self.now = View()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []

    def subscribe(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def change(self, view: View) -> None:
        self.now = view
        for callback in self._callbacks:
            callback()


@dataclass(frozen=True, slots=True)
class _MergedSlot:
    """A slot of this worker with the combined state of all workers."""

    own: Slot
    state: State
    reason: str

    @property
    def name(self) -> str:
        return self.own.name

    @property
    def version(self) -> int:
        return self.own.version

    @property
    def model(self) -> Model | None:
        return self.own.model

    def observe(self, seen: Observation) -> None:
        self.own.observe(seen)


class MergedRegistry:
    """A :class:`service.contract.Registry` of a worker.

    A request is answered by this worker's model, even if other workers are not ready. Readiness is that of all workers
    that listen, because the client's next connection may reach any of them.
    """

    def __init__(self, own: Registry, latest: LatestView) -> None:
        self._own = own
        self._latest = latest

    @property
    def live(self) -> bool:
        return self._own.live

    @property
    def ready(self) -> bool:
        return self._latest.now.ready and self._own.ready

    def acquire(self, name: str, version: str) -> AbstractContextManager[Model]:
        return self._own.acquire(name, version)

    def get(self, name: str, version: str) -> Model:
        return self._own.get(name, version)

    def find(self, name: str, version: str) -> Slot:
        return self._own.find(name, version)

    def is_ready(self, name: str, version: str) -> bool:
        if not self._own.is_ready(name, version):
            return False
        found = self._own.find(name, version)
        merged = self._latest.now.slots.get((found.name, found.version))
        return merged is not None and merged.state == "ready"

    def models(self) -> Sequence[Slot]:
        return [self._merged(slot) for slot in self._own.models()]

    def versions(self, name: str) -> list[int]:
        return self._own.versions(name)

    def subscribe(self, callback: Callable[[], None]) -> None:
        self._own.subscribe(callback)
        self._latest.subscribe(callback)

    def _merged(self, slot: Slot) -> Slot:
        if slot.state != "ready":
            return slot
        merged = self._latest.now.slots.get((slot.name, slot.version))
        return slot if merged is None else _MergedSlot(slot, merged.state, merged.reason)
