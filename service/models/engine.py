"""What runs a model's batches, and says which precision made the outputs."""

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
        """The outputs (None = all of them), and the precision that made them. Raises as :meth:`Runtime.run` does."""
        return self._runtime.run(feeds, outputs), self._runtime.info.precision

    def close(self) -> None:
        self._runtime.close()


class SwitchedEngine:
    """bf16's engine, and while it is there the fp32 reference, which then answers in its place.

    Each batch is wholly of one of them: which, is decided when it begins. No batch fails for a change: those that have
    begun with the reference end with it.
    """

    def __init__(self, bf16: Engine) -> None:
        self.bf16 = bf16
        self._fp32: _Used | None = None

    def run(self, feeds: Mapping[str, Array], outputs: Sequence[str] | None) -> tuple[dict[str, Array], str]:
        """See :meth:`Engine.run`."""
        fp32 = self._fp32
        if fp32 is None or not fp32.take():
            return self.bf16.run(feeds, outputs)
        try:
            return fp32.runtime.run(feeds, outputs), fp32.runtime.info.precision
        finally:
            fp32.give_back()

    @property
    def switched(self) -> bool:
        """Whether fp32 answers."""
        return self._fp32 is not None

    def switch(self, fp32: Runtime | None) -> None:
        """From the next batch on ``fp32`` answers, or, for None, bf16; whatever answered in fp32 is closed once its
        last batch has ended. Not from several threads at once."""
        used, self._fp32 = self._fp32, None if fp32 is None else _Used(fp32)
        if used is not None:
            used.end()

    def close(self) -> None:
        self.switch(None)
        self.bf16.close()


class _Used:
    """A runtime that is closed when nobody runs it any more, and not before."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._lock = threading.Lock()
        self._runs = 1  # and one more until its end

    def take(self) -> bool:
        """False: it has ended."""
        with self._lock:
            if self._runs:
                self._runs += 1
            return self._runs > 0

    def give_back(self) -> None:
        with self._lock:
            self._runs -= 1
            last = not self._runs
        if last:
            self.runtime.close()

    end = give_back


class SpreadEngine(Engine):
    """A batch that begins while no other runs has all threads; one beside others runs on ``narrow``, which has few.

    Threads that share a batch wait for each other at every operator, so where there is work for all cores, batches side
    by side do more (docs/decisions/0052); a lone client's must not wait for company that does not come.
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
