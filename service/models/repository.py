"""The models that are served: every request asks here for its own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future

from bf16kit.errors import InvalidRequest, NotFound, Unavailable
from bf16kit.runtime.weightstore import OWN, WeightStore
from bf16kit.wording import quoted, without_long_words
from service.drift.gate import Turn
from service.drift.owner import Order
from service.models.agreement import OWN_CHOICE, Agreement
from service.models.directory import LONGEST_VERSION
from service.models.generation import Generation
from service.models.goldengate import GoldenSchedule, Hear, unheard
from service.models.lease import Lease
from service.models.plan import Plan, Wish
from service.models.reconciler import UNLOAD_SECONDS, HandOf, Reconciler
from service.models.slot import Slot
from service.models.slottable import Slots
from service.request import Precision
from service.telemetry.metrics import Metrics

_PREFERENCE = {"ready": 2, "loading": 1, "unavailable": 0}
_NO_VERSION = 0  # they are counted from 1


class Repository:
    """See :class:`service.contract.Registry`. Models are asked for by :meth:`want` and :meth:`desire`, before or after
    :meth:`start`; :meth:`drain`, then :meth:`close`.

    ``ready_when_empty``: nothing need be asked for, as where models are loaded and unloaded over the network.
    ``agree``: about the profile of a plan, with other processes of the server.
    ``hand``: to the process that has the fp32 references, which samples of live requests are handed to; None: drift is
    not measured. ``hear``: of golden gates that are not passed. ``turn``: this process', of those that serve the same
    models.
    """

    def __init__(
        self,
        metrics: Metrics,
        *,
        device: str = "auto",
        threads: int | None = None,
        weights: WeightStore = OWN,
        unload_seconds: float = UNLOAD_SECONDS,
        ready_when_empty: bool = False,
        hand: HandOf | None = None,
        agree: Callable[[Plan], Agreement] = lambda plan: OWN_CHOICE,
        hear: Hear = unheard,
        turn: Turn = Turn(),  # noqa: B008 -- frozen
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
            hand=hand,
            agree=agree,
            hear=hear,
            turn=turn,
        )
        self._schedule = GoldenSchedule(self._serving, self._notify)

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Load what is wanted, one model after another, on a thread of their own."""
        self._reconciler.start()
        self._schedule.start()

    def want(self, wish: Wish) -> Future[None]:
        """See :meth:`Reconciler.want`."""
        if self._stopping:
            refused: Future[None] = Future()
            refused.set_exception(Unavailable("the server is shutting down; try another", "draining"))
            return refused
        return self._reconciler.want(wish)

    def desire(self, wishes: Iterable[Wish]) -> Mapping[str, Future[None]]:
        """See :meth:`Reconciler.desire`; nothing is begun any more when the server stops."""
        return {} if self._stopping else self._reconciler.desire(wishes)

    def order(self, order: Order) -> Future[None]:
        """See :meth:`service.models.orders.Orders.give`."""
        return self._reconciler.orders.give(order, self._slots.get(order.model, {}).get(order.version))

    def transition(self, model: str, version: int, to: Precision) -> None:
        """Count that the precision has changed that answers for this version, where it is here."""
        slot = self._slots.get(model, {}).get(version)
        if slot is not None:
            slot.series.transition(to)

    def retire(self) -> None:
        """From now on not ready, so that load balancers send no more; whoever still comes is answered."""
        self._retired = True
        self._notify()

    def drain(self) -> None:
        """From now on not ready, and every new request is refused."""
        self._stopping = True
        self._notify()

    def close(self, timeout: float | None = None) -> bool:
        """Free every model, all at once; False when something was still at work after ``timeout`` seconds."""
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
            if model.leases.take():
                return Lease(model.leases, model)
            # It was unpublished between the two: what has taken its place is found now.

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

    def leaving(self) -> Sequence[Slot]:
        """What has been unpublished, and answers its last requests."""
        return self._reconciler.leaving

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
    """The version that a client names; None for the empty string, which asks for the newest. Raises InvalidRequest."""
    if version == "":
        return None
    if not (version.isascii() and version.isdecimal()):
        raise InvalidRequest(  # the first words are Triton's, which its clients look for
            f"failed to get model version from specified version string {quoted(version)}: it is not an integer ≥ 0;"
            " leave it empty for the newest version"
        )
    digits = version.lstrip("0")
    return int(digits or "0") if len(digits) <= LONGEST_VERSION else _NO_VERSION  # no directory has one so long


def _preference(slot: Slot) -> tuple[int, int]:
    """The newest ready version; failing that the newest that is loading; failing that the newest."""
    return _PREFERENCE[slot.state], slot.version
