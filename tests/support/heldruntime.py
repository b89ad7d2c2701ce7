"""A runtime whose runs a test can block, to check what happens meanwhile."""

import threading
from collections.abc import Mapping, Sequence

import numpy as np

from bf16kit.runtime import Array, RuntimeInfo


class BlockableRuntime:
    """A runtime whose runs block while ``go`` is not set. A run fails if the runtime is closed, as in ONNX Runtime."""

    def __init__(self, precision: str) -> None:
        self.info = RuntimeInfo("onnxruntime", "cpu", "cpu", precision, "fp32")
        self.inputs = self.outputs = ()
        self.open = True
        self.running = 0
        self.go = threading.Event()
        self.go.set()

    def run(
        self, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None, *, seconds: float | None = None
    ) -> dict[str, Array]:
        assert self.open
        self.running += 1
        assert self.go.wait(30)
        assert self.open, "closed beneath a run"
        self.running -= 1
        return {"y": np.zeros(1)}

    def close(self) -> None:
        self.open = False
