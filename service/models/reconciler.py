"""The reconciler: it knows which models are wanted, and its threads change what is served accordingly.

Callers only say what is wanted, as a :class:`DesiredModel` per model; the newest one counts. The threads apply them in
the order in which they came, one at a time, unless one takes long: then the next ones begin beside it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from bf16kit.messages.errors import Bf16kitError, BudgetExceeded, ConfigError, RuntimeFailure, Unavailable
from bf16kit.runtime.memory.weightstore import PRIVATE_STORE, WeightStore
from service.config import resources
from service.drift.forwarder import SampleSender
from service.drift.gate import ProcessRank
from service.models import loading, loads
from service.models.advice import AdviceLog
from service.models.fp32 import load_fp32
from service.models.generation import Generation
from service.models.goldengate import OnVerdict, ignore_verdict
from service.models.loads import STOPPING, Loads
from service.models.orders import PrecisionOrders
from service.models.pending import PendingChange, complete
from service.models.plan import DesiredModel, Plan
from service.models.slot import Slot
from service.models.slottable import Slots, SlotTable
from service.telemetry.metrics import Metrics
from service.telemetry.modelmetrics import ModelMetrics

_log = logging.getLogger(__name__)
_NOT_FOR_CALLERS = "the runtime could not load it, or failed on it; the server's log says why"
#: Changes in progress at most. Loads at the same time compete for processors and memory, so a change begins beside
#: others only if they take longer than PATIENCE_SECONDS.
CHANGES_AT_ONCE = 4
_LAST_LOADS_SECONDS = 5.0  # how long a stop waits for loads, whose results it discards
UNLOAD_SECONDS = 30.0  # how long an unload waits for requests in flight
#: Returns, for a model's name and plan, the sender of its samples to the process with the fp32 references.
NewSender = Callable[[str, Plan], SampleSender]


class Reconciler:
    """Owns the slots. :meth:`apply` may be called before :meth:`start`; :meth:`close` is final.

    ``changed`` is called, on any thread, after every change of a slot.
    """

    def __init__(
        self,
        metrics: Metrics,
        changed: Callable[[], None],
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
        self.orders = PrecisionOrders()
        self.unloading: tuple[Slot, ...] = ()  # replaced as a whole: removed slots whose last requests are in flight
        self._table = SlotTable(metrics, ready_when_empty=ready_when_empty)
        self._metrics = metrics
        self._changed = changed
        self._device = device
        self._threads_per_run = threads
        self._weights = weights
        self._new_sender = new_sender
        self._on_verdict, self._rank = on_verdict, rank
        self._unload_seconds = unload_seconds
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._pending: dict[str, PendingChange] = {}
        self._in_progress: dict[str, tuple[DesiredModel, float]] = {}  # by model; and when it began
        self._closed = False
        self._advice = AdviceLog()
        self._loads = Loads()
        self._threads = [
            threading.Thread(target=self._work, name=f"reconciler-{number}", daemon=True)
            for number in range(CHANGES_AT_ONCE)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def slots(self) -> Slots:
        """All slots, sorted by name and version."""
        return self._table.slots

    @property
    def ready(self) -> bool:
        """See :attr:`SlotTable.ready`."""
        return self._table.ready

    def apply(self, desired: DesiredModel) -> Future[None]:
        """Ask for a model to be served as ``desired`` says. New versions get a slot in state ``loading`` at once.

        The future ends when that is done. It fails with Unavailable if a version cannot be loaded (with the
        reason), if the server shuts down, or if the opposite was wanted before a thread came to it.
        """
        future = self._enqueue(desired)
        assert future is not None  # noqa: S101 - for the type checker
        return future

    def _enqueue(self, desired: DesiredModel, *, unless_tried: bool = False) -> Future[None] | None:
        """Queue ``desired``. With ``unless_tried``, return None if that would only repeat an attempt."""
        future: Future[None] = Future()
        with self._lock:
            if self._closed:
                future.set_exception(Unavailable(STOPPING, "draining"))
                return future
            if unless_tried and self._was_tried(desired):
                return None
            earlier = self._pending.get(desired.name, PendingChange(desired))
            same = bool(earlier.desired.plans) == bool(desired.plans)
            self._pending[desired.name] = PendingChange(desired, [*(earlier.futures if same else ()), future])
            superseded = [] if same else earlier.futures
            self._table.add(desired, awaited=self._threads[0].ident is None or not self.ready)
            self._wake.notify_all()
            begun = self._in_progress.get(desired.name)
        for plan in () if begun is None else begun[0].plans:
            self._loads.supersede(plan.digest, wanted=plan in desired.plans)
        complete(
            superseded,
            Unavailable(f"model {desired.name!r} is being {'loaded' if desired.plans else 'unloaded'} instead"),
        )
        self._changed()
        return future

    def apply_all(self, desired_models: Iterable[DesiredModel]) -> dict[str, Future[None]]:
        """Ask for exactly these models; all others are unloaded. Returns a future per model that changes, by name.

        A model that could not be loaded, or is being loaded, is tried again only if its plan has changed. :meth:`apply`
        always tries.
        """
        wanted = {desired.name: desired for desired in desired_models}
        with self._lock:
            known = (*self.slots, *self._pending)
        for name in known:
            wanted.setdefault(name, DesiredModel(name))
        futures = {name: self._enqueue(wanted[name], unless_tried=True) for name in sorted(wanted)}
        return {name: future for name, future in futures.items() if future is not None}

    def _was_tried(self, desired: DesiredModel) -> bool:
        """Return whether ``desired`` was tried already, or is being tried. Call it with the lock held."""
        if desired.name in self._pending or not self._table.of(desired.name).keys() >= desired.reported_versions:
            return False
        begun = self._in_progress.get(desired.name)
        return (begun is not None and begun[0] == desired) or self._table.was_tried(desired)

    def close(self, deadline: float = math.inf) -> bool:
        """Unload everything, in parallel. Returns False if something was still running at ``deadline``.

        That is a request, a batch, a shadow sample, or a model being loaded. A load is given up after a few seconds:
        nothing needs its result. ``deadline`` is in :func:`time.monotonic` seconds.
        """
        with self._lock:
            self._closed = True
            abandoned, self._pending = self._pending, {}
            self._wake.notify_all()
            slots = self._table.all()
            models = [model for slot in slots if (model := slot.withdraw("unloaded")) is not None]
        for change in abandoned.values():
            complete(change.futures, Unavailable(STOPPING, "draining"))
        with ThreadPoolExecutor(max(1, len(models)), "unload") as unloading:
            clean = all(list(unloading.map(lambda model: model.close(deadline), models)))
        loaded = self._loads.stop(min(deadline, time.monotonic() + _LAST_LOADS_SECONDS))
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
        ended = loaded and not any(thread.is_alive() for thread in self._threads)
        if not ended:
            _log.warning("a model is still being loaded or unloaded; stopping without waiting for it")
        for slot in slots:
            self._metrics.remove(slot.series)
        return clean and ended

    # --- the threads --------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (change := self._next()) is not None:
            error: Exception | None = None
            try:
                self._reconcile(change.desired)
            except Bf16kitError as refused:
                error = refused
            except Exception as bug:  # noqa: BLE001 - this thread must live on for the other models
                _log.exception("model %r: reconciling failed unexpectedly", change.desired.name)
                error = bug
            with self._wake:
                del self._in_progress[change.desired.name]
                self._wake.notify_all()
            complete(change.futures, error)

    def _next(self) -> PendingChange | None:
        """Block until a change may begin, and return it; None when the reconciler is closed.

        It is the oldest one whose model is not being changed, once every change in progress has had its time alone.
        """
        with self._wake:
            while not self._closed:
                now = time.monotonic()
                name = next((name for name in self._pending if name not in self._in_progress), None)
                wait = max(
                    (begun + loads.PATIENCE_SECONDS - now for _, begun in self._in_progress.values()), default=0.0
                )
                if name is not None and wait <= 0:
                    change = self._pending.pop(name)
                    self._in_progress[name] = change.desired, now
                    return change
                self._wake.wait(None if name is None else wait)
            return None

    def _reconcile(self, desired: DesiredModel) -> None:
        """Load the versions, then unload others. If one cannot be loaded, see :meth:`SlotTable.surplus`."""
        slots = self._table.of(desired.name)
        reasons = {plan.version: self._serve(slots[plan.version], plan) for plan in desired.plans}
        failed = {version: reason for version, reason in reasons.items() if reason}
        if self._closed:
            raise Unavailable(STOPPING, "draining")
        if len(failed) < len(desired.plans) or not desired.plans:
            self._set_aside(desired)
            self._unload(desired)
        if failed:
            details = "; ".join(f"version {version} cannot be loaded: {reason}" for version, reason in failed.items())
            raise Unavailable(f"model {desired.name!r}: {details}")

    def _serve(self, slot: Slot, plan: Plan) -> str:
        """Load ``plan`` and let it answer. Returns the reason if that fails, else ""."""
        if self._closed:
            return STOPPING
        if slot.serves(plan):
            slot.clear_reason()
            return ""
        slot.start_loading(plan)
        started = time.monotonic()
        try:
            if plan.broken:
                raise ConfigError(plan.broken)
            load = partial(
                loading.load,
                plan.path,
                plan.serving,
                device=self._device,
                threads=self._threads_per_run,
                weights=self._weights,
            )
            loaded = self._loads.run(slot.label, plan.digest, lambda on_step: load(on_step=on_step))
            if not self._pending and slot.model is None:  # before it answers; at a start, once for all models
                resources.collect_and_freeze()
            replaced = self._publish(slot, plan, loaded, started)
        except Bf16kitError as error:
            if isinstance(error, BudgetExceeded) and slot.model is None:  # else the gate of what serves has not failed
                slot.series.gate("failed", time.time())
            reason = slot.fail(str(error), _NOT_FOR_CALLERS if isinstance(error, RuntimeFailure) else "")
        except Exception:  # noqa: BLE001 - a bug in loading one model must not take the others down
            _log.exception("%s: loading failed unexpectedly", slot.label)
            reason = slot.fail("an unexpected error, see the server's log")
        else:
            self._changed()
            self._advice.log(slot.label, loaded.runtime.info)
            if replaced is not None:
                replaced.close(time.monotonic() + self._unload_seconds)
                del replaced
                resources.collect_and_freeze()
            return ""
        self._changed()
        return reason

    def _publish(self, slot: Slot, plan: Plan, loaded: loading.LoadedModel, started: float) -> Generation | None:
        """Put what was loaded into the slot. Returns the generation that it replaces, if any."""
        with self._lock:
            if self._closed:
                loaded.close()
                raise Unavailable("the server was shut down before it was loaded")
            replaced = slot.model
            try:
                model = self._generation(slot, plan, loaded)
            except BaseException:
                loaded.close()
                raise
            seconds = time.monotonic() - started
            model.metrics.ready(True, seconds)
            # before it is published: the log has the line when clients see the model ready
            _log.info("%s is ready after %.2f s: %s", slot.label, seconds, loaded.summary)
            slot.publish(model, plan)
            self.orders.on_published(slot)
            return replaced

    def _generation(self, slot: Slot, plan: Plan, loaded: loading.LoadedModel) -> Generation:
        digest = plan.digest

        def new_metrics() -> ModelMetrics:
            if slot.model is not None:
                slot.series = self._metrics.add(slot.name, slot.version)
            return slot.series

        return Generation(
            slot.name,
            slot.version,
            loaded,
            plan.serving,
            new_metrics,
            None if self._new_sender is None else self._new_sender(slot.name, plan),
            lambda verdict: self._on_verdict(verdict.with_plan(digest)),
            self._rank,
            fp32=partial(
                load_fp32, slot.label, loaded.opened, plan.serving, threads=self._threads_per_run, weights=self._weights
            ),
            changed=self._changed,
        )

    def _set_aside(self, desired: DesiredModel) -> None:
        """Report the versions that failed as unavailable. One that serves here failed in another process."""
        if not desired.failed:
            return
        with self._lock:
            slots = {} if self._closed else self._table.of(desired.name)
            failed = [(slots[each.plan.version], each) for each in desired.failed if each.plan.version in slots]
            for slot, _ in failed:
                self.orders.forget(slot)
            models = [slot.set_aside(each.plan, f"{each.reason}; {desired.instead}") for slot, each in failed]
        self._changed()
        if withdrawn := [model for model in models if model is not None]:
            for model in withdrawn:
                model.close(time.monotonic() + self._unload_seconds)
            del models, withdrawn, model
            resources.collect_and_freeze()

    def _unload(self, desired: DesiredModel) -> None:
        """Unload the versions of the model that are not needed."""
        with self._lock:
            surplus = [] if self._closed else self._table.surplus(desired)
            newer = self._pending.get(desired.name)  # its versions have slots already
            removed = [slot for slot in surplus if newer is None or slot.version not in newer.desired.reported_versions]
            if not removed:
                return
            for slot in removed:
                self.orders.forget(slot)
            self._table.remove(desired.name, removed)
            models = [slot.withdraw("unloaded") for slot in removed]
            self.unloading += tuple(removed)
        self._changed()
        for slot, model in zip(removed, models, strict=True):
            if model is not None:
                model.close(time.monotonic() + self._unload_seconds)
            self._metrics.remove(slot.series)
            _log.info("%s is unloaded", slot.label)
        with self._lock:
            self.unloading = tuple(slot for slot in self.unloading if slot not in removed)
        del surplus, removed, models, slot, model
        resources.collect_and_freeze()
