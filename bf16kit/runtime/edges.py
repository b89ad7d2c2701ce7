"""What every runtime says of itself, kept once: its inputs and outputs, and how it runs."""

from __future__ import annotations

from bf16kit.runtime import RuntimeInfo
from bf16kit.tensors import TensorSpec


class Edges:
    """The properties of :class:`bf16kit.runtime.Runtime`, from what whoever inherits has set."""

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
