"""What runs a model's batches, and says which precision made the outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bf16kit.runtime import Runtime
from service.contract import Array


class Engine:
    """One runtime behind the batcher. Whoever adds a second one decides here, batch by batch, which of them answers."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def run(self, feeds: Mapping[str, Array], outputs: Sequence[str] | None) -> tuple[dict[str, Array], str]:
        """The outputs (None = all of them), and the precision that made them. Raises as :meth:`Runtime.run` does."""
        return self._runtime.run(feeds, outputs), self._runtime.info.precision

    def close(self) -> None:
        self._runtime.close()
