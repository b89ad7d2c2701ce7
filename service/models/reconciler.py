"""The reconciler: it knows which models are wanted, and one thread changes what is served accordingly.

Callers only say what is wanted, as a :class:`Wish` per model; the newest wish counts. The thread fulfils the wishes one
at a time, in the order in which they came.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from bf16kit.errors import Bf16kitError, ConfigError, RuntimeFailure, Unavailable
from bf16kit.runtime.weightstore import OWN, WeightStore
from service.drift.gate import ProcessRank
from service.drift.sampling import SampleSender
from service.models import loading
from service.models.advice import Advice
from service.models.agreement import OWN_CHOICE, Agreement
from service.models.fp32 import load_fp32
from service.models.generation import Generation
from service.models.goldengate import OnVerdict, ignore_verdict
from service.models.orders import Orders
from service.models.plan import Plan, Wish
from service.models.slot import Slot
from service.models.slottable import Slots, SlotTable
from service.models.waiting import Waiting, tell
from service.process import garbage
from service.telemetry.metrics import Metrics

_log = logging.getLogger(__name__)
_NOT_FOR_CALLERS = "the runtime could not load it, or failed on it; the server's log says why"
UNLOAD_SECONDS = 30.0  # how long an unload waits for requests in flight
#: Returns, for a model's name and plan, the sender of its samples to the process with the fp32 references.
NewSender = Callable[[str, Plan], SampleSender]
_STOPPING = "the server is shutting down; try another"


class Reconciler:
    """Owns the slots. :meth:`want` may be called before :meth:`start`; :meth:`close` is final.

    ``changed`` is called, on any thread, after every change of a slot.
    """

    def __init__(
        self,
        metrics: Metrics,
        changed: Callable[[], None],
        *,
        device: str = "auto",
        threads: int | None = None,
        weights: WeightStore = OWN,
        unload_seconds: float = UNLOAD_SECONDS,
        ready_when_empty: bool = False,
        new_sender: NewSender | None = None,
        agree: Callable[[Plan], Agreement] = lambda plan: OWN_CHOICE,
        on_verdict: OnVerdict = ignore_verdict,
        rank: ProcessRank = ProcessRank(),  # noqa: B008 -- frozen
    ) -> None:
        self.orders = Orders()
        self.leaving: tuple[Slot, ...] = ()  # removed slots whose last requests are in flight
        self._table = SlotTable(metrics, ready_when_empty=ready_when_empty)
        self._metrics = metrics
        self._changed = changed
        self._device = device
        self._threads = threads
        self._weights = weights
        self._new_sender = new_sender
        self._agree = agree
        self._on_verdict, self._rank = on_verdict, rank
        self._unload_seconds = unload_seconds
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._waiting: dict[str, Waiting] = {}
        self._at_work: Wish | None = None
        self._closed = False
        self._advice = Advice()
        self._thread = threading.Thread(target=self._work, name="reconciler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def slots(self) -> Slots:
        """All slots, sorted by name and version."""
        return self._table.slots

    @property
    def ready(self) -> bool:
        """See :attr:`SlotTable.ready`."""
        return self._table.ready

    def want(self, wish: Wish) -> Future[None]:
        """Ask for a model to be served as ``wish`` says. New versions get a slot in state ``loading`` at once.

        The future ends when the wish is fulfilled. It fails with Unavailable if a version cannot be loaded (with the
        reason), if the server shuts down, or if the opposite was wanted before the thread came to it.
        """
        told = self._ask(wish)
        assert told is not None  # noqa: S101 - for the type checker
        return told

    def _ask(self, wish: Wish, *, unless_tried: bool = False) -> Future[None] | None:
        """Queue ``wish`` for the thread. With ``unless_tried``, return None if that would only repeat an attempt."""
        told: Future[None] = Future()
        with self._lock:
            if self._closed:
                told.set_exception(Unavailable(_STOPPING))
                return told
            if unless_tried and self._tried(wish):
                return None
            earlier = self._waiting.get(wish.name, Waiting(wish))
            same = bool(earlier.wish.plans) == bool(wish.plans)
            self._waiting[wish.name] = Waiting(wish, [*(earlier.told if same else ()), told])
            overtaken = [] if same else earlier.told
            self._table.add(wish, awaited=self._thread.ident is None or not self.ready)
            self._wake.notify()
        tell(overtaken, Unavailable(f"model {wish.name!r} is being {'loaded' if wish.plans else 'unloaded'} instead"))
        self._changed()
        return told

    def desire(self, wishes: Iterable[Wish]) -> dict[str, Future[None]]:
        """Ask for exactly these models; all others are unloaded. Returns a future per model that changes, by name.

        A model that could not be loaded, or is being loaded, is tried again only if its plan has changed. :meth:`want`
        always tries.
        """
        wanted = {wish.name: wish for wish in wishes}
        with self._lock:
            known = (*self.slots, *self._waiting)
        for name in known:
            wanted.setdefault(name, Wish(name))
        asked = {name: self._ask(wanted[name], unless_tried=True) for name in sorted(wanted)}
        return {name: told for name, told in asked.items() if told is not None}

    def _tried(self, wish: Wish) -> bool:
        """Return whether ``wish`` was tried already, or is being tried. Call it with the lock held."""
        if wish.name in self._waiting or not self._table.of(wish.name).keys() >= wish.versions:
            return False
        return wish == self._at_work or self._table.tried(wish)

    def close(self, deadline: float = math.inf) -> bool:
        """Unload everything, in parallel. Returns False if something was still running at ``deadline``.

        That is a request, a batch, a shadow sample, or a model being loaded. ``deadline`` is in :func:`time.monotonic`
        seconds.
        """
        with self._lock:
            self._closed = True
            abandoned, self._waiting = self._waiting, {}
            self._wake.notify()
            slots = self._table.all()
            models = [model for slot in slots if (model := slot.withdraw("unloaded")) is not None]
        for waiting in abandoned.values():
            tell(waiting.told, Unavailable(_STOPPING))
        with ThreadPoolExecutor(max(1, len(models)), "unload") as unloading:
            clean = all(list(unloading.map(lambda model: model.close(deadline), models)))
        if self._thread.ident is not None:
            self._thread.join(None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            _log.warning("a model is still being loaded or unloaded; stopping without waiting for it")
        for slot in slots:
            self._metrics.remove(slot.series)
        return clean and not self._thread.is_alive()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (waiting := self._next()) is not None:
            error: Exception | None = None
            try:
                self._fulfil(waiting.wish)
            except Bf16kitError as refused:
                error = refused
            except Exception as bug:  # noqa: BLE001 - this thread must live on for the other models
                _log.exception("model %r: reconciling failed unexpectedly", waiting.wish.name)
                error = bug
            self._at_work = None
            tell(waiting.told, error)

    def _next(self) -> Waiting | None:
        """Block until there is a wish, and return the oldest; None when the reconciler is closed."""
        with self._wake:
            self._wake.wait_for(lambda: self._waiting or self._closed)
            if self._closed:
                return None
            waiting = self._waiting.pop(next(iter(self._waiting)))
            self._at_work = waiting.wish
            return waiting

    def _fulfil(self, wish: Wish) -> None:
        """Load the versions, then unload the model's others. If none can be loaded, what is served stays."""
        slots = self._table.of(wish.name)
        tried = {plan.version: self._serve(slots[plan.version], plan) for plan in wish.plans}
        failed = {version: reason for version, reason in tried.items() if reason}
        if self._closed:
            raise Unavailable(_STOPPING)
        if len(failed) < len(wish.plans) or not wish.plans:
            self._unload(wish)
        if failed:
            which = "; ".join(f"version {version} cannot be loaded: {reason}" for version, reason in failed.items())
            raise Unavailable(f"model {wish.name!r}: {which}")

    def _serve(self, slot: Slot, plan: Plan) -> str:
        """Load ``plan`` and let it answer. Returns the reason if that fails, else ""."""
        if self._closed:
            return _STOPPING
        if slot.serves(plan):
            slot.keep()
            return ""
        slot.begin(plan)
        begun = time.monotonic()
        try:
            if plan.broken:
                raise ConfigError(plan.broken)
            loaded = loading.load(
                plan.path,
                plan.serving,
                device=self._device,
                threads=self._threads,
                weights=self._weights,
                agreement=self._agree(plan),
            )
            if not self._waiting and slot.model is None:  # before it answers; at a start, once for all models
                garbage.settle()
            replaced = self._publish(slot, plan, loaded, begun)
        except Bf16kitError as error:
            reason = slot.fail(str(error), _NOT_FOR_CALLERS if isinstance(error, RuntimeFailure) else "")
        except Exception:  # noqa: BLE001 - a bug in loading one model must not take the others down
            _log.exception("%s: loading failed unexpectedly", slot.label)
            reason = slot.fail("an unexpected error, see the server's log")
        else:
            self._changed()
            self._advice.give(slot.label, loaded.runtime.info)
            if replaced is not None:
                replaced.close(time.monotonic() + self._unload_seconds)
                del replaced
                garbage.settle()
            return ""
        self._changed()
        return reason

    def _publish(self, slot: Slot, plan: Plan, loaded: loading.Loaded, begun: float) -> Generation | None:
        """Put what was loaded into the slot. Returns the generation that it replaces, if any."""
        with self._lock:
            if self._closed:
                loaded.close()
                raise Unavailable("the server was shut down before it was loaded")
            replaced = slot.model
            if replaced is not None:
                slot.series = self._metrics.add(slot.name, slot.version)
            model = self._generation(slot, plan, loaded)
            model.start()
            seconds = time.monotonic() - begun
            model.metrics.ready(True, seconds)
            # before it is published: the log has the line when clients see the model ready
            _log.info("%s is ready after %.2f s: %s", slot.label, seconds, loaded.summary)
            slot.publish(model, plan)
            self.orders.published(slot)
            return replaced

    def _generation(self, slot: Slot, plan: Plan, loaded: loading.Loaded) -> Generation:
        digest = plan.digest
        return Generation(
            slot.name,
            slot.version,
            loaded,
            plan.serving,
            slot.series,
            None if self._new_sender is None else self._new_sender(slot.name, plan),
            lambda verdict: self._on_verdict(verdict.with_plan(digest)),
            self._rank,
            fp32=partial(
                load_fp32, slot.label, loaded.opened, plan.serving, threads=self._threads, weights=self._weights
            ),
            changed=self._changed,
        )

    def _unload(self, wish: Wish) -> None:
        """Unload all versions of the model that are not wanted."""
        with self._lock:
            slots = {} if self._closed else self._table.of(wish.name)
            gone = [slot for version, slot in slots.items() if version not in self._wanted(wish)]
            if not gone:
                return
            for slot in gone:
                self.orders.forget(slot)
            self._table.remove(wish.name, gone)
            models = [slot.withdraw("unloaded") for slot in gone]
            self.leaving = tuple(gone)
        self._changed()
        for slot, model in zip(gone, models, strict=True):
            if model is not None:
                model.close(time.monotonic() + self._unload_seconds)
            self._metrics.remove(slot.series)
            _log.info("%s is unloaded", slot.label)
        self.leaving = ()
        del slots, gone, models, slot, model
        garbage.settle()

    def _wanted(self, wish: Wish) -> frozenset[int]:
        """Return the versions of ``wish``, and of a newer wish in the queue, whose versions have slots already."""
        newer = self._waiting.get(wish.name)
        return wish.versions if newer is None else wish.versions | newer.wish.versions
