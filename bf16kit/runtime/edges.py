"""Properties that all runtimes share: inputs, outputs, and how the model runs."""

from __future__ import annotations

from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import RuntimeInfo


class RuntimeProperties:
    """The properties of :class:`bf16kit.runtime.Runtime`, read from attributes that the subclass sets."""

    _inputs: tuple[TensorSpec, ...]
    _outputs: tuple[TensorSpec, ...]
    _info: RuntimeInfo

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return self._inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return self._outputs

    @property
    def info(self) -> RuntimeInfo:
        return self._info
