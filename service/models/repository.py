"""The models that are served; every request gets its model here."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future

from bf16kit.messages.errors import InvalidRequest, NotFound, Unavailable
from bf16kit.messages.wording import quoted, without_long_words
from bf16kit.runtime.memory.weightstore import PRIVATE_STORE, WeightStore
from service.drift.gate import ProcessRank
from service.drift.owner import ActivePlan, PrecisionOrder
from service.models.directory import LONGEST_VERSION
from service.models.generation import Generation
from service.models.goldengate import GoldenSchedule, OnVerdict, ignore_verdict
from service.models.lease import Lease
from service.models.plan import DesiredModel
from service.models.reconciler import UNLOAD_SECONDS, NewSender, Reconciler
from service.models.slot import Slot
from service.models.slottable import Slots
from service.request import Precision
from service.telemetry.metrics import Metrics

_PREFERENCE = {"ready": 2, "loading": 1, "unavailable": 0}
_NO_VERSION = 0  # a version that does not exist: versions begin at 1


class Repository:
    """The models of one process: see :class:`service.contract.Registry`.

    Say with :meth:`apply` and :meth:`apply_all`, before or after :meth:`start`, which models to serve. To end, call
    :meth:`drain`, then :meth:`close`.

    ``ready_when_empty``: the server is ready without models, as when clients load them. ``new_sender`` creates the
    sender of a model's samples to the process with the fp32 references; None: drift is not measured. ``on_verdict``
    receives the verdicts of golden gates that are not passed. ``rank`` is the rank of this process among those that
    serve the same models.
    """

    def __init__(
        self,
        metrics: Metrics,
        *,
        device: str = "auto",
        threads: int | None = None,
        weights: WeightStore = PRIVATE_STORE,
        unload_seconds: float = UNLOAD_SECONDS,
        ready_when_empty: bool = False,
        new_sender: NewSender | None = None,
        on_verdict: OnVerdict = ignore_verdict,
        rank: ProcessRank = ProcessRank(),  # noqa: B008 -- frozen
    ) -> None:
        self._callbacks: list[Callable[[], None]] = []
        self._stopping = self._retired = False
        self._reconciler = Reconciler(
            metrics,
            self._notify,
            device=device,
            threads=threads,
            weights=weights,
            unload_seconds=unload_seconds,
            ready_when_empty=ready_when_empty,
            new_sender=new_sender,
            on_verdict=on_verdict,
            rank=rank,
        )
        self._schedule = GoldenSchedule(self._serving, self._notify)

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Load the wanted models, one after another, in the background."""
        self._reconciler.start()
        self._schedule.start()

    def apply(self, desired: DesiredModel) -> Future[None]:
        """See :meth:`Reconciler.apply`."""
        if self._stopping:
            refused: Future[None] = Future()
            refused.set_exception(Unavailable("the server is shutting down; try another", "draining"))
            return refused
        return self._reconciler.apply(desired)

    def apply_all(self, desired_models: Iterable[DesiredModel]) -> Mapping[str, Future[None]]:
        """See :meth:`Reconciler.apply_all`; does nothing once the server stops."""
        return {} if self._stopping else self._reconciler.apply_all(desired_models)

    def active_plan(self, model: str, version: int) -> ActivePlan | None:
        """See :meth:`service.drift.owner.ServingProcesses.active_plan`."""
        slot = self._slots.get(model, {}).get(version)
        loaded = None if slot is None else slot.loaded
        if loaded is None:
            return None
        generation, plan = loaded
        return ActivePlan(plan.digest, generation.since, plan.serving.fallback)

    def order(self, order: PrecisionOrder) -> Future[None]:
        """See :meth:`service.models.orders.PrecisionOrders.apply`."""
        return self._reconciler.orders.apply(order, self._slots.get(order.model, {}).get(order.version))

    def transition(self, model: str, version: int, to: Precision) -> None:
        """Count that another precision answers for this version, if it is served here."""
        slot = self._slots.get(model, {}).get(version)
        if slot is not None:
            slot.series.transition(to)

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
        self._schedule.stop()
        return self._reconciler.close(math.inf if timeout is None else time.monotonic() + timeout)

    # --- the registry -------------------------------------------------------------------------------------------------

    @property
    def live(self) -> bool:
        return True

    @property
    def ready(self) -> bool:
        return not (self._stopping or self._retired) and self._reconciler.ready

    def acquire(self, name: str, version: str) -> Lease[Generation]:
        while True:
            try:
                model = self.get(name, version)
            except Unavailable as error:
                if error.reason:
                    self.find(name, version).series.rejected(error.reason)
                raise
            if model.leases.acquire():
                return Lease(model.leases, model)
            # The model was replaced or unloaded between the two calls: look again.

    def get(self, name: str, version: str) -> Generation:
        slot = self.find(name, version)
        if self._stopping:
            raise Unavailable("the server is shutting down; try another", "draining")
        model = slot.model
        if model is not None:
            return model
        if slot.state == "loading":
            raise Unavailable(f"{slot.label} is loading; try again later")
        which = f"version {slot.version}" if version else "no version"
        raise NotFound(f"{which} of model {name!r} is {'not ' if version else ''}ready; the server's log says why")

    def find(self, name: str, version: str) -> Slot:
        versions = self._slots.get(name)
        wanted = parse_version(version)
        if versions is None:
            raise NotFound(f"unknown model {quoted(name)}")
        if wanted is None:
            return max(versions.values(), key=_preference)
        if wanted not in versions:
            raise NotFound(
                f"model {name!r} has no version {without_long_words(version)}; it has {', '.join(map(str, versions))}"
            )
        return versions[wanted]

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


def _preference(slot: Slot) -> tuple[int, int]:
    """Order slots: ready before loading before unavailable, and then the newest version."""
    return _PREFERENCE[slot.state], slot.version
