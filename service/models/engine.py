"""Engines run a model's batches and report the precision that made the outputs."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from bf16kit.runtime import Runtime
from service.contract import Array


class Engine:
    """The runtime behind the batcher."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def run(self, feeds: Mapping[str, Array], outputs: Sequence[str] | None) -> tuple[dict[str, Array], str]:
        """Return the outputs (None: all) and the precision that made them. Raises as :meth:`Runtime.run` does."""
        return self._runtime.run(feeds, outputs), self._runtime.info.precision

    def close(self) -> None:
        self._runtime.close()


class SwitchedEngine:
    """Runs batches on the bf16 engine, or on the fp32 reference while that is switched on.

    Each batch runs wholly on one of them, chosen when it begins. A switch fails no batch: batches that began on the
    reference end on it.
    """

    def __init__(self, bf16: Engine) -> None:
        self.bf16 = bf16
        self._fp32: _SharedRuntime | None = None

    def run(self, feeds: Mapping[str, Array], outputs: Sequence[str] | None) -> tuple[dict[str, Array], str]:
        """See :meth:`Engine.run`."""
        fp32 = self._fp32
        if fp32 is None or not fp32.acquire():
            return self.bf16.run(feeds, outputs)
        try:
            return fp32.runtime.run(feeds, outputs), fp32.runtime.info.precision
        finally:
            fp32.release()

    @property
    def switched(self) -> bool:
        """Whether fp32 answers."""
        return self._fp32 is not None

    def switch(self, fp32: Runtime | None) -> None:
        """Have the next batches run on ``fp32``, or on bf16 for None. Not for several threads at once.

        The previous fp32 runtime is closed when its last batch has ended.
        """
        previous, self._fp32 = self._fp32, None if fp32 is None else _SharedRuntime(fp32)
        if previous is not None:
            previous.end()

    def close(self) -> None:
        self.switch(None)
        self.bf16.close()


class _SharedRuntime:
    """A runtime that is closed when its last run has ended after :meth:`end`."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._lock = threading.Lock()
        self._runs = 1  # runs in progress, plus 1 until end()

    def acquire(self) -> bool:
        """Begin a run. Returns False if the runtime has ended."""
        with self._lock:
            if self._runs:
                self._runs += 1
            return self._runs > 0

    def release(self) -> None:
        with self._lock:
            self._runs -= 1
            last = not self._runs
        if last:
            self.runtime.close()

    end = release


class ParallelEngine(Engine):
    """Runs a batch on all threads if no other batch runs; otherwise on ``narrow``, which has few threads.

    Threads that share a batch wait for each other at every operator. With work for all cores, several batches side by
    side have more throughput (docs/decisions/0052). A single client's batch should not wait for others that do not
    come.
    """

    def __init__(self, runtime: Runtime, narrow: Runtime) -> None:
        super().__init__(runtime)
        self._narrow = narrow
        self._lock = threading.Lock()
        self._running = 0

    def run(self, feeds: Mapping[str, Array], outputs: Sequence[str] | None) -> tuple[dict[str, Array], str]:
        """See :meth:`Engine.run`."""
        with self._lock:
            alone = self._running == 0
            self._running += 1
        try:
            return (self._runtime if alone else self._narrow).run(feeds, outputs), self._runtime.info.precision
        finally:
            with self._lock:
                self._running -= 1

    def close(self) -> None:
        super().close()
        self._narrow.close()
