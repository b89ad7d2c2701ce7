"""The fp32 reference that can answer for one generation: loaded on a thread of its own, and warm before it answers.

While bf16 answers, it takes no memory.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

from bf16kit.messages.errors import Bf16kitError, Unavailable
from bf16kit.messages.wording import brief
from bf16kit.runtime import Runtime
from service.contract import ActivePrecision
from service.models.engine import SwitchedEngine
from service.request import Precision

_log = logging.getLogger(__name__)


class ReferenceStandby:
    """Switches the precision that answers to the one that :meth:`order` names. ``load`` returns the warm reference.

    ``changed`` is called, on any thread, after every change of :attr:`active_precision`; ``failed`` when the reference
    could not be loaded.
    """

    def __init__(
        self,
        label: str,
        engine: SwitchedEngine,
        load: Callable[[], Runtime],
        changed: Callable[[ActivePrecision], None],
        failed: Callable[[], None],
    ) -> None:
        self.active_precision = ActivePrecision()
        self._label = label
        self._engine = engine
        self._load = load
        self._changed = changed
        self._failed = failed
        self._lock = threading.Lock()
        self._wanted: Precision = "bf16"
        self._reason = ""
        self._pending: list[Future[None]] = []
        self._loading = False
        self._closed = False

    def order(self, precision: Precision, reason: str) -> Future[None]:
        """Have ``precision`` answer; return a future that ends when it does.

        The future fails with the error of loading the reference, or with Unavailable if another order came first or the
        model is unloaded.
        """
        future: Future[None] = Future()
        with self._lock:
            if self._closed:
                future.set_exception(Unavailable(f"{self._label} is unloaded"))
                return future
            self._wanted, self._reason = precision, reason
            superseded: list[Future[None]] = []
            error: RuntimeError | None = None
            if precision == "fp32" and not self._engine.switched:
                error = self._start_loading()
                if error is None:
                    self._pending.append(future)
                    return future
            elif precision == "bf16":
                superseded, self._pending = self._pending, []
                self._engine.switch(None)
            if error is None:
                self._update_active_precision()
        for each in superseded:
            each.set_exception(Unavailable(f"{self._label} is to answer in bf16 instead"))
        if error is None:
            future.set_result(None)
        else:
            self._load_failed(error)
            future.set_exception(error)
        return future

    def close(self) -> None:
        """Switch no more. A reference that is still being loaded is closed when it is there."""
        with self._lock:
            self._closed = True
            pending, self._pending = self._pending, []
        for each in pending:
            each.set_exception(Unavailable(f"{self._label} is unloaded"))

    def _start_loading(self) -> RuntimeError | None:
        """Start the thread that loads the reference, unless it runs. Returns the error if no thread can be started.

        Call it with the lock held.
        """
        if not self._loading:
            try:
                threading.Thread(target=self._load_reference, name=f"{self._label}-fp32", daemon=True).start()
            except RuntimeError as error:
                return error
            self._loading = True
        return None

    def _load_failed(self, error: Exception) -> None:
        _log.error(
            "%s: the fp32 reference cannot be loaded to answer: %s",
            self._label,
            brief(error),
            exc_info=None if isinstance(error, Bf16kitError) else error,
        )
        self._failed()

    def _update_active_precision(self) -> None:
        """Update :attr:`active_precision`. Call it with the lock held."""
        active = ActivePrecision("fp32" if self._engine.switched else "bf16", self._reason)
        if active != self.active_precision:
            self.active_precision = active
            self._changed(active)

    def _load_reference(self) -> None:
        error: Exception | None = None
        runtime: Runtime | None = None
        try:
            runtime = self._load()
        except Exception as caught:  # noqa: BLE001 - bf16 goes on, and the callers get the error
            error = caught
            self._load_failed(caught)
        with self._lock:
            self._loading = False
            pending, self._pending = self._pending, []
            if runtime is not None and self._wanted == "fp32" and not self._closed:
                self._engine.switch(runtime)
                self._update_active_precision()
                runtime = None
        if runtime is not None:
            runtime.close()  # it was not switched on: no longer wanted
        for each in pending:
            if error is None:
                each.set_result(None)
            else:
                each.set_exception(error)
