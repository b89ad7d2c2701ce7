"""The source itself as the fp32 reference, if no graph of it could be made. It uses no part of the artifact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bf16kit.messages.errors import RuntimeFailure
from bf16kit.numerics.tensors import TensorSpec
from bf16kit.runtime import Array, RuntimeInfo
from bf16kit.runtime.device import CPU
from bf16kit.runtime.edges import RuntimeProperties
from converter.source import Oracle


@dataclass(frozen=True, slots=True)
class OracleReference:
    """The source in place of a reference graph.

    ``rowwise`` is false if one row's input may change another row's outputs. Then no batch axis may be declared,
    whatever a test with two rows shows.
    """

    oracle: Oracle
    rowwise: bool

    def open(self, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> OracleRuntime:
        """Return a runtime that takes ``inputs`` and computes ``outputs``."""
        return OracleRuntime(self.oracle, inputs, outputs)


class OracleRuntime(RuntimeProperties):
    """A :class:`bf16kit.runtime.Runtime` that calls ``oracle``."""

    def __init__(self, oracle: Oracle, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
        self._oracle: Oracle | None = oracle
        self._inputs, self._outputs = tuple(inputs), tuple(outputs)

    @property
    def info(self) -> RuntimeInfo:
        how = "" if self._oracle is None else self._oracle.how
        return RuntimeInfo("torch", CPU, "reference", "fp32", "unknown", how)

    def run(
        self, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None, *, seconds: float | None = None
    ) -> dict[str, Array]:
        """See :meth:`bf16kit.runtime.Runtime.run`."""
        if self._oracle is None:
            raise RuntimeFailure("the model is closed")
        (found,) = self._oracle([dict(feeds)])
        return found if outputs is None else {name: found[name] for name in outputs}

    def close(self) -> None:
        """Release the source. ``run`` fails from now on."""
        self._oracle = None
