"""A runtime that computes its output with a function."""

from collections.abc import Callable, Mapping, Sequence

from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import Array, RuntimeInfo

IN = (TensorSpec("x", "float32", ("n", 4)),)
OUT = (TensorSpec("y", "float32", ("y_0", 4)),)


class Computed:
    """A runtime that computes ``y`` from ``x`` with a function."""

    def __init__(self, function: Callable[[Array], Array]) -> None:
        self._function = function
        self.inputs, self.outputs = IN, OUT
        self.info = RuntimeInfo("numpy", "cpu", "reference", "fp32", "fp32")

    def run(
        self, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None, *, seconds: float | None = None
    ) -> dict[str, Array]:
        return {"y": self._function(feeds["x"])}

    def close(self) -> None:
        """Nothing to free."""
