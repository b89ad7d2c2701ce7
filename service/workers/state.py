"""The state of a server of several workers: what each worker reports, and the state of the whole that follows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from typing import Any, NoReturn

from bf16kit.messages.errors import NotFound, Unavailable
from bf16kit.messages.wording import quoted
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import RuntimeInfo
from service.contract import (
    GATE_FAILED,
    ActivePrecision,
    Bounds,
    Model,
    Registry,
    Scheduling,
    Slot,
    State,
    StatisticsSnapshot,
    TensorSemantics,
)
from service.peers.channel import from_json, to_json
from service.request import Observation, Request

_RANK: dict[State, int] = {"ready": 0, "loading": 1, "unavailable": 2}
UNLOADING = "unloading"  # the reason of a version that is not desired any more
Key = tuple[str, int]  # a model's name and version


@dataclass(frozen=True, slots=True)
class Description:
    """A loaded model as seen by the supervisor: a :class:`service.contract.Model` that cannot run.

    It has no labels: they are only needed for responses, and there are many.
    """

    name: str
    version: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batch_axis: int | None
    max_batch_size: int
    max_queue_delay_s: float
    instances: int
    bounds: Bounds
    semantics: TensorSemantics
    scheduling: Scheduling
    info: RuntimeInfo
    active_precision: ActivePrecision
    golden: str
    budget: Mapping[str, float]
    weight_bytes: int = 0

    @classmethod
    def of(cls, model: Model) -> Description:
        """Describe a model as it is now."""
        values = {each.name: getattr(model, each.name) for each in fields(cls) if each.name != "weight_bytes"}
        values["semantics"] = replace(model.semantics, labels={})
        return cls(**values, weight_bytes=model.statistics.weight_bytes)

    @property
    def statistics(self) -> StatisticsSnapshot:
        """The statistics without counts, which the supervisor sums when it is asked for them."""
        return StatisticsSnapshot(weight_bytes=self.weight_bytes)

    def infer(self, request: Request) -> NoReturn:
        raise Unavailable("models run in the workers, not here")

    def observe(self, observation: Observation) -> None:
        """Do nothing: the workers count."""


@dataclass(frozen=True, slots=True)
class SlotState:
    """The state of one version of one model, in one worker or in all: a :class:`service.contract.Slot`."""

    name: str
    version: int
    state: State
    reason: str = ""
    model: Description | None = None

    @classmethod
    def of(cls, slot: Slot) -> SlotState:
        """Describe a slot as it is now."""
        model = slot.model
        return cls(slot.name, slot.version, slot.state, slot.reason, None if model is None else Description.of(model))

    @property
    def key(self) -> Key:
        return self.name, self.version

    def observe(self, observation: Observation) -> None:
        """Do nothing: the workers count."""


@dataclass(frozen=True, slots=True)
class Report:
    """One worker's report on itself.

    ``listening``: clients' connections may reach it. ``ready`` means the same as for a server of one process, so models
    added later need not be ready.
    """

    listening: bool
    ready: bool
    slots: tuple[SlotState, ...] = ()


class ServerState:
    """The state of the whole server, and a :class:`service.contract.Registry` of it for those who only look.

    The supervisor folds the workers' reports into it (:meth:`fold`) and sends it to all of them (:meth:`receive`), so
    that reading it costs no message.

    The server becomes ready once every worker listens and is ready: before that, it would get the traffic of a whole
    server with a part of its capacity. From then on (``complete``) it, and each version, is ready if it is in every
    worker that listens: clients cannot reach another one, because a restarted worker listens only once its models are
    loaded. If none listens any more, everything begins anew.
    """

    def __init__(self) -> None:
        self.ready = False
        self.complete = False
        # By name and version, ascending; replaced as a whole, so that readers need no lock.
        self.slots: Mapping[Key, SlotState] = {}
        self._callbacks: list[Callable[[], None]] = []

    def fold(self, reports: Sequence[Report | None], desired: Iterable[Key], *, retired: bool = False) -> bool:
        """Take over the newest ``reports``, by worker, None for one that is starting; return whether anything changed.

        ``desired`` is what all are to serve. A ``retired`` server is not ready.
        """
        before, desired = (self.ready, self.slots), set(desired)
        workers = {number: _by_key(report) for number, report in enumerate(reports, 1)}
        listening = {number: report for number, report in enumerate(reports, 1) if report and report.listening}
        ready = bool(listening) and all(report.ready for report in listening.values())
        self.complete = bool(listening) and (self.complete or (ready and len(listening) == len(workers)))
        if self.complete:
            workers = {number: workers[number] for number in listening}
        keys = sorted(desired.union(*(slots for slots in workers.values() if slots is not None)))
        self.slots = {key: _worst(key, workers, desired=key in desired) for key in keys}
        self.ready = ready and self.complete and not retired
        return (self.ready, self.slots) != before

    def to_json(self) -> dict[str, Any]:
        """Return what :meth:`receive` takes."""
        return {"ready": self.ready, "slots": [to_json(slot) for slot in self.slots.values()]}

    def receive(self, state: Mapping[str, Any]) -> None:
        """Take over the state that the supervisor has sent."""
        slots = from_json(tuple[SlotState, ...], state["slots"])
        self.slots, self.ready = {slot.key: slot for slot in slots}, state["ready"]
        self.notify()

    def notify(self) -> None:
        """Tell the subscribers that it has changed."""
        for callback in self._callbacks:
            callback()

    # --- the registry -------------------------------------------------------------------------------------------------

    @property
    def live(self) -> bool:
        return True

    def acquire(self, name: str, version: str) -> NoReturn:
        raise Unavailable("models run in the workers, not here")

    def get(self, name: str, version: str) -> Model:
        slot = self.find(name, version)
        if slot.model is None:
            raise Unavailable(f"model {slot.name!r} version {slot.version} is {slot.state}")
        return slot.model

    def find(self, name: str, version: str) -> SlotState:
        found = self._found(name, version)
        if not found:
            raise NotFound(f"unknown model {quoted(name)}")
        return found[-1]

    def is_ready(self, name: str, version: str) -> bool:
        return any(slot.state == "ready" for slot in self._found(name, version))

    def models(self) -> Sequence[SlotState]:
        return list(self.slots.values())

    def versions(self, name: str) -> list[int]:
        return [slot.version for slot in self._found(name, "") if slot.state == "ready"]

    def subscribe(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def _found(self, name: str, version: str) -> list[SlotState]:
        return [slot for slot in self.slots.values() if slot.name == name and version in ("", str(slot.version))]


class WorkerRegistry:
    """A worker's :class:`service.contract.Registry`: runs its own models, and is ready when the whole server is.

    A request is answered by this worker's model, even if other workers are not ready. Readiness is that of all workers
    that listen, because the client's next connection may reach any of them.
    """

    def __init__(self, own: Registry, server: ServerState) -> None:
        self._own = own
        self._server = server
        self.get, self.find, self.models, self.versions = own.get, own.find, own.models, own.versions

    @property
    def live(self) -> bool:
        return self._own.live

    @property
    def ready(self) -> bool:
        return self._server.ready and self._own.ready

    def acquire(self, name: str, version: str) -> AbstractContextManager[Model]:
        return self._own.acquire(name, version)

    def is_ready(self, name: str, version: str) -> bool:
        if not self._own.is_ready(name, version):
            return False
        found = self._own.find(name, version)
        slot = self._server.slots.get((found.name, found.version))
        return slot is not None and slot.state == "ready"

    def subscribe(self, callback: Callable[[], None]) -> None:
        self._own.subscribe(callback)
        self._server.subscribe(callback)


def _badness(slot: SlotState) -> tuple[int, bool]:
    """Return a sort key. Of two ready slots, one with a reason is worse: it could not be replaced."""
    return _RANK[slot.state], bool(slot.reason)


def _by_key(report: Report | None) -> Mapping[Key, SlotState] | None:
    return None if report is None else {slot.key: slot for slot in report.slots}


def _worst(key: Key, workers: Mapping[int, Mapping[Key, SlotState] | None], *, desired: bool) -> SlotState:
    """Return the worst of the workers' states of a version, because a client may reach any of them."""
    states = [_state(key, number, slots, desired=desired) for number, slots in workers.items()]
    models = [slot.model for slot in states if slot.model is not None]
    # Of equal models, describe one whose golden gate did not pass.
    failed = (model for model in models if model.golden.startswith(GATE_FAILED))
    return replace(max(states, key=_badness), model=next(failed, next(iter(models), None)))


def _state(key: Key, number: int, slots: Mapping[Key, SlotState] | None, *, desired: bool) -> SlotState:
    if slots is None:
        return SlotState(*key, "loading", f"worker {number} is being started")
    slot = slots.get(key)
    if slot is None:
        return SlotState(*key, "loading", "loading") if desired else SlotState(*key, "unavailable", UNLOADING)
    if not slot.reason or slot.reason.startswith("worker "):  # it was another worker that could not load it
        return slot
    return replace(slot, reason=f"worker {number}: {slot.reason}")
