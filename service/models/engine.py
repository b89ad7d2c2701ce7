"""The engine that runs a generation's batches: in bf16, or in fp32 while the reference is switched on."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

from bf16kit.messages.errors import Bf16kitError, Unavailable
from bf16kit.messages.wording import brief
from bf16kit.runtime import Runtime
from bf16kit.service.contract import ActivePrecision, Array
from bf16kit.service.request import Precision

_log = logging.getLogger(__name__)
_Leased = TypeVar("_Leased")


def complete(futures: Iterable[Future[None]], error: BaseException | None) -> None:
    """End the futures of callers: with ``error``, or successfully for None."""
    for future in futures:
        if not future.set_running_or_notify_cancel():
            continue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


class Leases:
    """Counts the holders of one object, and grants no lease after :meth:`end`.

    ``unused`` is called once after that, when the last one is released, on the thread that releases it.
    """

    def __init__(self, unused: Callable[[], object] = lambda: None) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._unused = unused
        self._count = 1  # one until the end
        self._ended = False

    def acquire(self) -> bool:
        """Get a lease. Returns False after :meth:`end`."""
        with self._changed:
            if not self._ended:
                self._count += 1
            return not self._ended

    def release(self) -> None:
        with self._changed:
            self._count -= 1
            last = not self._count
            if last:
                self._changed.notify_all()
        if last:
            self._unused()

    @contextmanager
    def context(self, leased: _Leased) -> Iterator[_Leased]:
        """Return a context that has ``leased``. It releases the lease, which the caller has acquired."""
        try:
            yield leased
        finally:
            self.release()

    def end(self) -> None:
        """Grant no more leases. Those that are in use stay valid."""
        with self._changed:
            if self._ended:
                return
            self._ended = True
        self.release()

    def wait(self, deadline: float) -> bool:
        """After :meth:`end`, wait for the last lease; return False if one is still in use at ``deadline``.

        ``deadline`` is in :func:`time.monotonic` seconds; inf means no limit.
        """
        with self._changed:
            timeout = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
            return self._changed.wait_for(lambda: not self._count, timeout)


class Engine:
    """Runs batches on ``bf16``, or on the fp32 reference while that was ordered: :meth:`order`.

    Each batch runs wholly on one of them, chosen when it begins. A switch fails no batch: batches that began on the
    reference end on it. While bf16 answers, the reference takes no memory; ``load`` loads it, warm, on a thread of its
    own. ``changed`` is called, on any thread, after every change of :attr:`active_precision`; ``failed`` when the
    reference could not be loaded.
    """

    def __init__(
        self,
        label: str,
        bf16: Runtime,
        load: Callable[[], Runtime],
        changed: Callable[[ActivePrecision], None],
        failed: Callable[[], None],
    ) -> None:
        self.active_precision = ActivePrecision()
        self._label = label
        self._bf16 = bf16
        self._fp32: tuple[Runtime, Leases] | None = None  # replaced as a whole: runs read it without the lock
        self._load = load
        self._changed = changed
        self._failed = failed
        self._lock = threading.Lock()  # guards what follows, and switches
        self._wanted: Precision = "bf16"
        self._reason = ""
        self._pending: list[Future[None]] = []
        self._loading = self._closed = False

    def run(self, feeds: Mapping[str, Array], outputs: Sequence[str] | None) -> tuple[dict[str, Array], str]:
        """Return the outputs (None: all) and the precision that made them. Raises as :meth:`Runtime.run` does."""
        fp32 = self._fp32
        if fp32 is None or not fp32[1].acquire():
            return self.run_bf16(feeds, outputs)
        runtime, leases = fp32
        with leases.context(runtime):
            return runtime.run(feeds, outputs), runtime.info.precision

    def run_bf16(self, feeds: Mapping[str, Array], outputs: Sequence[str] | None) -> tuple[dict[str, Array], str]:
        """Run in bf16, whatever is switched on."""
        return self._bf16.run(feeds, outputs), self._bf16.info.precision

    def order(self, precision: Precision, reason: str) -> Future[None]:
        """Have ``precision`` answer; return a future that ends when it does.

        The future fails with the error of loading the reference, or with Unavailable if another order came first or the
        model is unloaded.
        """
        future: Future[None] = Future()
        superseded: list[Future[None]] = []
        error: Exception | None = None
        with self._lock:
            if self._closed:
                future.set_exception(Unavailable(f"{self._label} is unloaded"))
                return future
            self._wanted, self._reason = precision, reason
            if precision == "bf16":
                superseded, self._pending = self._pending, []
                self._switch(None)
            elif self._fp32 is not None:
                self._update()
            else:
                error = self._start_loading()
                if error is None:
                    self._pending.append(future)
                    return future
        complete(superseded, Unavailable(f"{self._label} is to answer in bf16 instead"))
        if error is not None:
            self._report(error)
        complete([future], error)
        return future

    def stop(self) -> None:
        """Switch no more. A reference that is still being loaded is closed when it is there."""
        with self._lock:
            self._closed = True
            pending, self._pending = self._pending, []
        complete(pending, Unavailable(f"{self._label} is unloaded"))

    def close(self) -> None:
        """Free both runtimes, after :meth:`stop`; a run in fp32 that has not ended keeps its own."""
        fp32, self._fp32 = self._fp32, None
        if fp32 is not None:
            fp32[1].end()
        self._bf16.close()

    # --- inside: with the lock held, but for the loading thread -------------------------------------------------------

    def _switch(self, fp32: Runtime | None) -> None:
        """Have the next batches run on ``fp32``; the previous one is closed when its last batch has ended."""
        previous, self._fp32 = self._fp32, None if fp32 is None else (fp32, Leases(fp32.close))
        if previous is not None:
            previous[1].end()
        self._update()

    def _update(self) -> None:
        active = ActivePrecision("bf16" if self._fp32 is None else "fp32", self._reason)
        if active != self.active_precision:
            self.active_precision = active
            self._changed(active)

    def _start_loading(self) -> RuntimeError | None:
        """Start the thread that loads the reference, unless it runs; return the error if it cannot be started."""
        if not self._loading:
            try:
                threading.Thread(target=self._load_reference, name=f"{self._label}-fp32", daemon=True).start()
            except RuntimeError as error:
                return error
            self._loading = True
        return None

    def _load_reference(self) -> None:
        error: Exception | None = None
        runtime: Runtime | None = None
        try:
            runtime = self._load()
        except Exception as caught:  # noqa: BLE001 - bf16 goes on, and the callers get the error
            error = caught
            self._report(caught)
        with self._lock:
            self._loading = False
            pending, self._pending = self._pending, []
            if runtime is not None and self._wanted == "fp32" and not self._closed:
                self._switch(runtime)
                runtime = None
        if runtime is not None:
            runtime.close()  # it was not switched on: no longer wanted
        complete(pending, error)

    def _report(self, error: Exception) -> None:
        bug = None if isinstance(error, Bf16kitError) else error
        text = "%s: the fp32 reference cannot be loaded to answer: %s"
        _log.error(text, self._label, brief(error), exc_info=bug)
        self._failed()
