"""The models that are served; every request gets its model here."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar, Unpack

from bf16kit.messages.errors import InvalidRequest, NotFound, Unavailable
from bf16kit.messages.wording import quoted, without_long_words
from bf16kit.service.config.loops import PeriodicThread
from bf16kit.service.contract import SlotView
from bf16kit.service.drift.fallbackcontroller import ActivePlan, PrecisionOrder
from bf16kit.service.drift.sampler import lower_priority
from bf16kit.service.models.controller import Controller
from bf16kit.service.models.generation import Generation
from bf16kit.service.models.loads import STOPPING
from bf16kit.service.models.plan import LONGEST_VERSION, DesiredModel
from bf16kit.service.models.reconciler import Options, Reconciler
from bf16kit.service.models.slot import Slot, Slots
from bf16kit.service.operations import IndexEntry, RegistryModels
from bf16kit.service.request import Precision
from bf16kit.service.telemetry.metrics import Metrics

S = TypeVar("S", bound=SlotView)
_PREFERENCE = {"ready": 2, "loading": 1, "unavailable": 0}
_CHECK_SECONDS = 1.0  # how often the schedule of golden gates is checked
_NO_VERSION = 0  # a version that does not exist: versions begin at 1


class Repository:
    """The models of one process: see :class:`bf16kit.service.contract.Registry`.

    Say with :meth:`apply` and :meth:`apply_all`, before or after :meth:`start`, which models to serve. To end, call
    :meth:`drain`, then :meth:`close`. It is also the :class:`bf16kit.service.drift.fallbackcontroller.ServingProcesses`
    of a server with this one process.
    """

    def __init__(self, metrics: Metrics, **options: Unpack[Options]) -> None:
        self._callbacks: list[Callable[[], None]] = []
        self._stopping = self._retired = False
        self._reconciler = Reconciler(metrics, self._notify, **options)
        self._schedule = golden_schedule(self._serving, self._notify)

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Load the wanted models, one after another, in the background."""
        self._reconciler.start()
        self._schedule.start()

    def apply(self, desired: DesiredModel) -> Future[None]:
        """See :meth:`Reconciler.apply`."""
        if self._stopping:
            refused: Future[None] = Future()
            refused.set_exception(Unavailable(STOPPING, "draining"))
            return refused
        return self._reconciler.apply(desired)

    def apply_all(self, desired_models: Iterable[DesiredModel]) -> dict[str, Future[None]]:
        """Apply all of these, and return a future for each, by name."""
        return {desired.name: self.apply(desired) for desired in desired_models}

    def retire(self) -> None:
        """Report not ready from now on, so that load balancers send no more requests. Requests are still answered."""
        self._retired = True
        self._notify()

    def drain(self) -> None:
        """Report not ready and reject every new request from now on."""
        self._stopping = True
        self._notify()

    def close(self, timeout: float | None = None) -> bool:
        """Free all models, in parallel. Returns False if something was still running after ``timeout`` seconds."""
        self._stopping = True
        self._schedule.stop(wait=False)  # a gate that runs holds a lease
        return self._reconciler.close(math.inf if timeout is None else time.monotonic() + timeout)

    # --- the precision that answers -----------------------------------------------------------------------------------

    def active_plan(self, model: str, version: int) -> ActivePlan | None:
        """See :meth:`bf16kit.service.drift.fallbackcontroller.ServingProcesses.active_plan`."""
        slot = self._slots.get(model, {}).get(version)
        loaded = None if slot is None else slot.loaded
        if loaded is None:
            return None
        generation, plan = loaded
        return ActivePlan(plan.digest, generation.since, plan.serving.fallback)

    def order(self, order: PrecisionOrder) -> Future[None]:
        """See :meth:`Slot.order`. The future fails with Unavailable without a slot, too."""
        slot = self._slots.get(order.model, {}).get(order.version)
        if slot is not None:
            return slot.order(order)
        failed: Future[None] = Future()
        failed.set_exception(Unavailable(f"model {order.model!r} version {order.version} is not loaded here"))
        return failed

    def transition(self, model: str, version: int, to: Precision) -> None:
        """Count that another precision answers for this version, if it is served here."""
        slot = self._slots.get(model, {}).get(version)
        if slot is not None:
            slot.series.transition(to)

    # --- the registry -------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return not (self._stopping or self._retired) and self._reconciler.ready

    def acquire(self, name: str, version: str) -> Generation:
        while True:
            try:
                model = self.get(name, version)
            except Unavailable as error:
                if error.reason:
                    self.find(name, version).series.rejected(error.reason)
                raise
            if model.leases.acquire():
                return model
            # The model was replaced or unloaded between the two calls: look again.

    def get(self, name: str, version: str) -> Generation:
        slot = self.find(name, version)
        if self._stopping:
            raise Unavailable(STOPPING, "draining")
        model = slot.model
        if model is not None:
            return model
        raise not_ready(slot, version)

    def find(self, name: str, version: str) -> Slot:
        return find_slot(self._slots, name, version)

    def is_ready(self, name: str, version: str) -> bool:
        try:
            return self.find(name, version).state == "ready" and not (self._stopping or self._retired)
        except NotFound:
            return False

    def models(self) -> list[Slot]:
        return [slot for versions in self._slots.values() for slot in versions.values()]

    def unloading(self) -> Sequence[Slot]:
        """The removed slots whose last requests are still in flight."""
        return self._reconciler.unloading

    def versions(self, name: str) -> list[int]:
        return [version for version, slot in self._slots.get(name, {}).items() if slot.state == "ready"]

    def subscribe(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    # --- inside -------------------------------------------------------------------------------------------------------

    @property
    def _slots(self) -> Slots:
        return self._reconciler.slots

    def _serving(self) -> list[Generation]:
        return [model for slot in self.models() if (model := slot.model) is not None]

    def _notify(self) -> None:
        for callback in self._callbacks:
            callback()


class RepositoryListing(RegistryModels):
    """The index also has models in the repository that are not served."""

    def __init__(self, repository: Repository, controller: Controller) -> None:
        super().__init__(repository)
        self._repository = repository
        self._controller = controller

    def index(self) -> Sequence[IndexEntry]:
        served = super().index()
        known = {(line.name, line.version) for line in served}
        unloading = [IndexEntry(slot.name, str(slot.version), "UNLOADING") for slot in self._repository.unloading()]
        return self._controller.index(
            [*served, *(line for line in unloading if (line.name, line.version) not in known)]
        )


def find_slot(slots: Mapping[str, Mapping[int, S]], name: str, version: str) -> S:
    """Return the slot that a client names, in any state. Raises NotFound or InvalidRequest."""
    versions, wanted = slots.get(name), parse_version(version)
    if versions is None:
        raise NotFound(f"unknown model {quoted(name)}")
    if wanted is None:  # ready before loading before unavailable, and then the newest
        return max(versions.values(), key=lambda slot: (_PREFERENCE[slot.state], slot.version))
    if wanted not in versions:
        known = ", ".join(map(str, versions))
        raise NotFound(f"model {name!r} has no version {without_long_words(version)}; it has {known}")
    return versions[wanted]


def not_ready(slot: SlotView, version: str) -> Unavailable | NotFound:
    """Return the error for a request for ``version`` while no generation answers in its slot."""
    if slot.state == "loading":
        return Unavailable(f"model {slot.name!r} version {slot.version} is loading; try again later")
    which = f"version {slot.version}" if version else "no version"
    return NotFound(f"{which} of model {slot.name!r} is {'not ' if version else ''}ready; the server's log says why")


def parse_version(version: str) -> int | None:
    """Return the version that a client names, or None for "", which selects the newest. Raises InvalidRequest."""
    if version == "":
        return None
    if not (version.isascii() and version.isdecimal()):
        raise InvalidRequest(  # the first words are Triton's, which its clients look for
            f"failed to get model version from specified version string {quoted(version)}: it is not an integer ≥ 0;"
            " leave it empty for the newest version"
        )
    digits = version.lstrip("0")
    return int(digits or "0") if len(digits) <= LONGEST_VERSION else _NO_VERSION  # no directory has a longer name


# --- golden gates that are due ----------------------------------------------------------------------------------------


def golden_schedule(serving: Callable[[], Iterable[Generation]], changed: Callable[[], None]) -> PeriodicThread:
    """Return the thread that runs the gates of the generations that answer. ``changed`` is called after each gate.

    A gate holds a lease, so unloading its model waits for it; it is freed when the gate is over.
    """

    def tick() -> None:
        lower_priority()
        run_due_gates(serving(), changed, time.monotonic)

    return PeriodicThread("golden-gate", _CHECK_SECONDS, tick)


def run_due_gates(
    models: Iterable[Generation], changed: Callable[[], None], clock: Callable[[], float] = time.monotonic
) -> None:
    """Run the gates that are due; ``clock`` returns :func:`time.monotonic` seconds."""
    for model in models:
        timetable = model.gate.timetable
        reason = timetable.due_reason(clock())
        if reason and model.leases.acquire():
            with model.leases.context(model):
                timetable.begin()
                timetable.end(clock(), model.gate.run(reason))
            changed()
