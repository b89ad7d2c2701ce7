"""The reconciler: it knows which models are wanted, and its threads change what is served accordingly.

Callers only say what is wanted, as a :class:`DesiredModel` per model; the newest one counts. The threads apply them in
the order in which they came, one at a time, unless one takes long: then the next ones begin beside it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias, TypedDict, Unpack

from bf16kit.messages.errors import Bf16kitError, BudgetExceeded, ConfigError, RuntimeFailure, Unavailable
from bf16kit.runtime import RuntimeInfo
from bf16kit.runtime.memory.weightstore import PRIVATE_STORE, WeightStore
from bf16kit.service.config import resources
from bf16kit.service.drift.gate import ProcessRank
from bf16kit.service.drift.sampler import SampleSender
from bf16kit.service.models import loading, loads
from bf16kit.service.models.engine import complete
from bf16kit.service.models.generation import Generation
from bf16kit.service.models.goldengate import OnVerdict
from bf16kit.service.models.loads import STOPPING, Loads
from bf16kit.service.models.plan import DesiredModel, Plan
from bf16kit.service.models.slot import Slot, Slots, SlotTable
from bf16kit.service.telemetry.metrics import Metrics
from bf16kit.service.telemetry.modelmetrics import ModelMetrics

_log = logging.getLogger(__name__)
_NOT_FOR_CALLERS = "the runtime could not load it, or failed on it; the server's log says why"
#: Changes in progress at most. Loads at the same time compete for processors and memory, so a change begins beside
#: others only if they take longer than PATIENCE_SECONDS.
CHANGES_AT_ONCE = 4
_LAST_LOADS_SECONDS = 5.0  # how long a stop waits for loads, whose results it discards
UNLOAD_SECONDS = 30.0  # how long an unload waits for requests in flight
#: Returns, for a model's name and plan, the sender of its samples to the process with the fp32 references.
NewSender: TypeAlias = Callable[[str, Plan], SampleSender]


class Options(TypedDict, total=False):
    """How models run and are served; every key has a default.

    ``device`` and ``threads`` are the server's, ``weights`` the store of copied weights. ``new_sender`` creates the
    sender of a model's samples; None: drift is not measured. ``on_verdict`` receives the verdicts of golden gates that
    are not passed; ``rank`` is this process's among those that serve the same models. ``ready_when_empty``: the server
    is ready without models, as when clients load them. ``load`` loads an artifact as :func:`loading.load` does.
    """

    device: str
    threads: int | None
    weights: WeightStore
    unload_seconds: float
    ready_when_empty: bool
    new_sender: NewSender | None
    on_verdict: OnVerdict
    rank: ProcessRank
    load: Callable[..., loading.LoadedModel]


@dataclass(slots=True)
class _PendingChange:
    """A desired model that waits for a thread, and the futures that end when it is applied or has failed."""

    desired: DesiredModel
    futures: list[Future[None]] = field(default_factory=list)


class Reconciler:
    """Owns the slots. :meth:`apply` may be called before :meth:`start`; :meth:`close` is final.

    ``changed`` is called, on any thread, after every change of a slot.
    """

    def __init__(self, metrics: Metrics, changed: Callable[[], None], **options: Unpack[Options]) -> None:
        self.unloading: tuple[Slot, ...] = ()  # replaced as a whole: removed slots whose last requests are in flight
        self._table = SlotTable(metrics, ready_when_empty=options.get("ready_when_empty", False))
        self._metrics = metrics
        self._changed = changed
        self._threads_per_run = options.get("threads")
        self._weights = options.get("weights", PRIVATE_STORE)
        self._load = options.get("load", loading.load)
        self._options = options
        self._unload_seconds = options.get("unload_seconds", UNLOAD_SECONDS)
        self._lock = threading.Lock()  # guards the table, and what follows
        self._wake = threading.Condition(self._lock)
        self._pending: dict[str, _PendingChange] = {}
        self._in_progress: dict[str, float] = {}  # when the change of a model began
        self._closed = False
        self._advised: set[str] = set()  # remedies in the log; other models on this machine usually need the same one
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
        return self._table.ready

    def apply(self, desired: DesiredModel) -> Future[None]:
        """Ask for a model to be served as ``desired`` says. New versions get a slot in state ``loading`` at once.

        The future ends when that is done. It fails with Unavailable if a version cannot be loaded (with the
        reason), if the server shuts down, or if the opposite was wanted before a thread came to it.
        """
        future: Future[None] = Future()
        with self._lock:
            if self._closed:
                future.set_exception(Unavailable(STOPPING, "draining"))
                return future
            earlier = self._pending.get(desired.name, _PendingChange(desired))
            same = bool(earlier.desired.plans) == bool(desired.plans)
            self._pending[desired.name] = _PendingChange(desired, [*(earlier.futures if same else ()), future])
            self._table.add(desired, awaited=self._threads[0].ident is None or not self.ready)
            self._wake.notify_all()
        instead = "loaded" if desired.plans else "unloaded"
        complete(() if same else earlier.futures, Unavailable(f"model {desired.name!r} is being {instead} instead"))
        self._changed()
        return future

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
        last_loads = min(deadline, time.monotonic() + _LAST_LOADS_SECONDS)
        self._loads.stop(last_loads)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
        ended = self._loads.wait(last_loads) and not any(thread.is_alive() for thread in self._threads)
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

    def _next(self) -> _PendingChange | None:
        """Block until a change may begin, and return it; None when the reconciler is closed.

        It is the oldest one whose model is not being changed, once every change in progress has had its time alone.
        """
        with self._wake:
            while not self._closed:
                now = time.monotonic()
                name = next((name for name in self._pending if name not in self._in_progress), None)
                newest = max(self._in_progress.values(), default=-math.inf)
                wait = newest + loads.PATIENCE_SECONDS - now
                if name is not None and wait <= 0:
                    self._in_progress[name] = now
                    return self._pending.pop(name)
                self._wake.wait(None if name is None else wait)
            return None

    def _reconcile(self, desired: DesiredModel) -> None:
        """Load the versions, then unload all others; if one cannot be loaded, all others stay.

        Whoever decides which models are wanted decides then what serves instead.
        """
        slots = self._table.of(desired.name)
        reasons = {plan.version: self._serve(slots[plan.version], plan) for plan in desired.plans}
        if self._closed:
            raise Unavailable(STOPPING, "draining")
        if failed := {version: reason for version, reason in reasons.items() if reason}:
            details = "; ".join(f"version {version} cannot be loaded: {reason}" for version, reason in failed.items())
            raise Unavailable(f"model {desired.name!r}: {details}")
        self._unload_others(desired)

    def _serve(self, slot: Slot, plan: Plan) -> str:
        """Load ``plan`` and let it answer. Returns the reason if that fails, else ""."""
        if self._closed:
            return STOPPING
        if slot.serves(plan):
            slot.clear_reason()
            return ""
        slot.start_loading()
        started = time.monotonic()
        try:
            if plan.broken:
                raise ConfigError(plan.broken)
            load = partial(
                self._load,
                plan.path,
                plan.serving,
                device=self._options.get("device", "auto"),
                threads=self._threads_per_run,
                weights=self._weights,
            )
            loaded = self._loads.run(slot.label, load, lambda: self._is_unwanted(slot.name, plan))
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
            self._advise(slot.label, loaded.runtime.info)
            self._close(replaced)
            return ""
        self._changed()
        return reason

    def _is_unwanted(self, name: str, plan: Plan) -> bool:
        """Return whether a change of the model waits that does not want ``plan``."""
        newer = self._pending.get(name)
        return newer is not None and plan not in newer.desired.plans

    def _publish(self, slot: Slot, plan: Plan, loaded: loading.LoadedModel, started: float) -> list[Generation | None]:
        """Put what was loaded into the slot. Returns the generation that it replaces, if any, for closing."""
        with self._lock:
            replaced = [slot.model]
            try:
                if self._closed:
                    raise Unavailable("the server was shut down before it was loaded")
                model = self._generation(slot, plan, loaded)
            except BaseException:
                loaded.close()
                raise
            seconds = time.monotonic() - started
            model.metrics.ready(True, seconds)
            # before it is published: the log has the line when clients see the model ready
            _log.info("%s is ready after %.2f s: %s", slot.label, seconds, loaded.summary)
            slot.publish(model, plan)
            return replaced

    def _generation(self, slot: Slot, plan: Plan, loaded: loading.LoadedModel) -> Generation:
        digest, options = plan.digest, self._options
        new_sender = options.get("new_sender")
        on_verdict: OnVerdict = options.get("on_verdict", lambda verdict: None)

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
            None if new_sender is None else new_sender(slot.name, plan),
            lambda verdict: on_verdict(replace(verdict, plan=digest)),
            options.get("rank", ProcessRank()),
            fp32=partial(
                loading.load_fp32,
                slot.label,
                loaded.opened,
                plan.serving,
                threads=self._threads_per_run,
                weights=self._weights,
            ),
            changed=self._changed,
        )

    def _advise(self, label: str, info: RuntimeInfo) -> None:
        """Log warnings about the numerics and the speed of a loaded model: each remedy once."""
        if info.accumulation != "fp32":
            _log.warning("%s: the accumulation probe found %s, not fp32", label, info.accumulation)
        if info.advice and info.note not in self._advised:
            self._advised.add(info.note)
            _log.warning("%s: %s", info.note, info.advice)

    def _unload_others(self, desired: DesiredModel) -> None:
        """Unload the versions that are not wanted, and those that failed; only the latter keep their slots.

        One that serves here may have failed in another process.
        """
        with self._lock:
            if self._closed:
                return
            slots, newer = self._table.of(desired.name), self._pending.get(desired.name)
            models = [
                slots[each.plan.version].set_aside(f"{each.reason}; {desired.instead}")
                for each in desired.failed
                if each.plan.version in slots
            ]
            kept = frozenset[int]() if newer is None else newer.desired.reported_versions  # they have slots already
            removed = tuple(slot for slot in self._table.others(desired) if slot.version not in kept)
            self._table.remove(desired.name, removed)
            models += [slot.withdraw("unloaded") for slot in removed]
            self.unloading += removed
        self._changed()
        self._close(models)
        for slot in removed:
            self._metrics.remove(slot.series)
            _log.info("%s is unloaded", slot.label)
        with self._lock:
            self.unloading = tuple(slot for slot in self.unloading if slot not in removed)

    def _close(self, models: list[Generation | None]) -> None:
        """Close generations that no longer answer, once their last requests have. Empties the list, to free them."""
        closed = False
        while models:
            model = models.pop()
            if model is not None:
                model.close(time.monotonic() + self._unload_seconds)
                closed = True
            del model
        if closed:
            resources.collect_and_freeze()
