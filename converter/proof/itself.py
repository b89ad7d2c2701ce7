"""The source itself as the fp32 reference, where no graph of it could be made: nothing of the artifact takes part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bf16kit.errors import RuntimeFailure
from bf16kit.runtime import Array, RuntimeInfo
from bf16kit.runtime.device import CPU
from bf16kit.runtime.edges import Edges
from bf16kit.tensors import TensorSpec
from converter.model import Oracle


@dataclass(frozen=True, slots=True)
class Itself:
    """What answers in a reference's place. Without ``rowwise`` one row may change what is computed of another, so that
    no batch axis may be declared, whatever two rows show."""

    oracle: Oracle
    rowwise: bool

    def open(self, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> Answering:
        """A runtime that takes ``inputs`` and gives ``outputs``."""
        return Answering(self.oracle, inputs, outputs)


class Answering(Edges):
    """A :class:`bf16kit.runtime.Runtime` that asks ``oracle``."""

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
        (answer,) = self._oracle([dict(feeds)])
        return answer if outputs is None else {name: answer[name] for name in outputs}

    def close(self) -> None:
        """Let go of the source. ``run`` fails from now on."""
        self._oracle = None
