"""What runs a model's batches, and says which precision made the outputs."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from bf16kit.runtime import Runtime
from service.contract import Array


class Engine:
    """The runtime behind the batcher. Whoever adds another one decides here, batch by batch, which of them answers."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def run(self, feeds: Mapping[str, Array], outputs: Sequence[str] | None) -> tuple[dict[str, Array], str]:
        """The outputs (None = all of them), and the precision that made them. Raises as :meth:`Runtime.run` does."""
        return self._runtime.run(feeds, outputs), self._runtime.info.precision

    def close(self) -> None:
        self._runtime.close()


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
