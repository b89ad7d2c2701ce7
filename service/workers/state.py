"""The state of a server of several workers: what each worker reports, and the state of the whole that follows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bf16kit.messages.errors import NotFound
from bf16kit.messages.wording import quoted
from bf16kit.service.contract import GATE_FAILED, Model, Registry, SlotView, State

_RANK: dict[State, int] = {"ready": 0, "loading": 1, "unavailable": 2}
UNLOADING = "unloading"  # the reason of a version that is not desired any more
Key = tuple[str, int]  # a model's name and version


class SlotState(NamedTuple):
    """The state of one version of one model, in one worker or in all: a :class:`bf16kit.service.contract.SlotView`."""

    name: str
    version: int
    state: State
    reason: str = ""
    running: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, slot: SlotView) -> SlotState:
        """Return the state of a slot as it is now."""
        return cls(slot.name, slot.version, slot.state, slot.reason, slot.running)

    @property
    def key(self) -> Key:
        return self.name, self.version


class Report(NamedTuple):
    """One worker's report on itself.

    ``listening``: clients' connections may reach it. ``ready`` means the same as for a server of one process, so models
    added later need not be ready.
    """

    listening: bool
    ready: bool
    slots: tuple[SlotState, ...] = ()

    @classmethod
    def from_json(cls, written: Mapping[str, Any]) -> Report:
        """Return the report whose ``_asdict()`` was sent as JSON."""
        return cls(written["listening"], written["ready"], tuple(SlotState(*each) for each in written["slots"]))


class ServerState:
    """The state of the whole server, in the supervisor: a :class:`bf16kit.service.contract.Overview`.

    The server becomes ready once every worker listens and is ready: before that, it would get the traffic of a whole
    server with a part of its capacity. From then on (``_complete``) it, and each version, is ready if it is in every
    worker that listens: clients cannot reach another one, because a restarted worker listens only once its models are
    loaded. If none listens any more, everything begins anew.
    """

    def __init__(self) -> None:
        self.ready = False
        # By name and version, ascending; replaced as a whole, so that readers need no lock.
        self.slots: Mapping[Key, SlotState] = {}
        self._complete = False

    def fold(self, reports: Sequence[Report | None], desired: Iterable[Key], *, retired: bool = False) -> None:
        """Take over the newest ``reports``, by worker, None for one that is starting.

        ``desired`` is what all are to serve. A ``retired`` server is not ready.
        """
        desired = set(desired)
        workers = {number: _by_key(report) for number, report in enumerate(reports, 1)}
        listening = {number: report for number, report in enumerate(reports, 1) if report and report.listening}
        ready = bool(listening) and all(report.ready for report in listening.values())
        self._complete = bool(listening) and (self._complete or (ready and len(listening) == len(workers)))
        if self._complete:
            workers = {number: workers[number] for number in listening}
        keys = sorted(desired.union(*(slots for slots in workers.values() if slots is not None)))
        self.slots = {key: _worst(key, workers, desired=key in desired) for key in keys}
        self.ready = ready and self._complete and not retired

    def to_json(self) -> dict[str, Any]:
        """Return what :meth:`WorkerRegistry.receive` takes: what is ready."""
        return {"ready": self.ready, "models": [key for key, slot in self.slots.items() if slot.state == "ready"]}

    def models(self) -> Sequence[SlotState]:
        return list(self.slots.values())

    def find(self, name: str, version: str) -> SlotState:
        found = [slot for slot in self.slots.values() if slot.name == name and version in ("", str(slot.version))]
        if not found:
            raise NotFound(f"unknown model {quoted(name)}")
        return found[-1]


class WorkerRegistry:
    """A worker's :class:`bf16kit.service.contract.Registry`: runs its own models, is ready when the whole server is.

    A request is answered by this worker's model, even if other workers are not ready. Readiness is that of all workers
    that listen, because the client's next connection may reach any of them: the supervisor tells it at every change.
    """

    def __init__(self, own: Registry) -> None:
        self._own = own
        self._server_ready = False
        self._ready_models: frozenset[Key] = frozenset()  # in all workers
        self._callbacks: list[Callable[[], None]] = []
        self.get, self.find, self.models, self.versions = own.get, own.find, own.models, own.versions

    def receive(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`ServerState.to_json` returned in the supervisor."""
        self._server_ready = state["ready"]
        self._ready_models = frozenset((name, version) for name, version in state["models"])
        for callback in self._callbacks:
            callback()

    @property
    def ready(self) -> bool:
        return self._server_ready and self._own.ready

    def acquire(self, name: str, version: str) -> Model:
        return self._own.acquire(name, version)

    def is_ready(self, name: str, version: str) -> bool:
        if not self._own.is_ready(name, version):
            return False
        found = self._own.find(name, version)
        return (found.name, found.version) in self._ready_models

    def subscribe(self, callback: Callable[[], None]) -> None:
        self._own.subscribe(callback)
        self._callbacks.append(callback)


def _by_key(report: Report | None) -> Mapping[Key, SlotState] | None:
    return None if report is None else {slot.key: slot for slot in report.slots}


def _worst(key: Key, workers: Mapping[int, Mapping[Key, SlotState] | None], *, desired: bool) -> SlotState:
    """Return the worst of the workers' states of a version, because a client may reach any of them.

    Of two ready ones, one with a reason is worse: it could not be replaced.
    """
    states = [_state(key, number, slots, desired=desired) for number, slots in workers.items()]
    running = [slot.running for slot in states if slot.running is not None]
    # Of equal models, show one whose golden gate did not pass.
    failed = (each for each in running if each["golden"].startswith(GATE_FAILED))
    worst = max(states, key=lambda slot: (_RANK[slot.state], bool(slot.reason)))
    return worst._replace(running=next(failed, next(iter(running), None)))


def _state(key: Key, number: int, slots: Mapping[Key, SlotState] | None, *, desired: bool) -> SlotState:
    if slots is None:
        return SlotState(*key, "loading", f"worker {number} is being started")
    slot = slots.get(key)
    if slot is None:
        return SlotState(*key, "loading", "loading") if desired else SlotState(*key, "unavailable", UNLOADING)
    if not slot.reason or slot.reason.startswith("worker "):  # it was another worker that could not load it
        return slot
    return slot._replace(reason=f"worker {number}: {slot.reason}")
