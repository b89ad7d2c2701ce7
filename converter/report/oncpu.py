"""Says whether a model gains memory and speed from bf16 weights on a CPU, and why."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from bf16kit.artifact.manifest import Manifest, Plan, TensorEntry
from bf16kit.converter.graph.operators import MOVEMENT
from bf16kit.converter.plan.profiles import RECURRED
from bf16kit.messages.wording import listed

_RECURRENT = frozenset({"LSTM", "GRU", "RNN"})
_DENSE = _RECURRENT | {"Conv", "ConvTranspose"}  # they do most of the arithmetic of the models that have them
_LOOKUP = "Gather"
_WORTH = 0.75  # of fp32's memory, at most, to be called a gain
_SHOWN = 0.005  # share of the weights from which on it is mentioned


@dataclass(frozen=True, slots=True)
class OnCpu:
    """What becomes of the elements of the weights when ONNX Runtime runs an artifact on a CPU; shares of 1.

    ``multiplied`` by the CPU kernel as bf16; ``convolved`` likewise, but in the profile cpu-bf16 only; ``looked_up``
    row by row in bf16 tables; ``widened`` from bf16 to fp32 at load, for the ``operators`` that have no bf16 kernel
    there. The rest is stored in fp32.
    """

    multiplied: float
    convolved: float
    looked_up: float
    widened: float
    operators: tuple[str, ...]

    @property
    def memory(self) -> float:
        """Bytes of the weights in memory ÷ those of the same weights in fp32."""
        return 1 - (self.multiplied + self.convolved + self.looked_up) / 2

    def __str__(self) -> str:
        """Say what is gained, and why, in a sentence without its subject."""
        dense = [name for name in self.operators if name in _DENSE and not (name == "Conv" and self.convolved)]
        speed = f" and speed outside {listed(dense)}" if dense else " and, as a rule, speed"
        memory = "memory" if self.memory <= _WORTH else "little memory"
        gains = f"{memory}{speed if self.multiplied + self.convolved > self.widened else ' and no speed'}"
        gains += ", in cpu-bf16 only" if self.convolved > self.multiplied else ""
        taken = f"{self.memory:.2f} × fp32's memory"
        parts = [f"{self.multiplied:.0%} are multiplied as bf16 by the CPU kernel"]
        if self.convolved >= _SHOWN:
            parts.append(f"{self.convolved:.0%} are convolved by it in cpu-bf16 only")
            taken += f", {self.memory + self.convolved / 2:.2f} × in cpu"
        if self.looked_up >= _SHOWN:
            parts.append(f"{self.looked_up:.0%} are tables, kept in bf16")
        if self.widened >= _SHOWN:
            parts.append(
                f"{self.widened:.0%} ({', '.join(self.operators)}) are widened to fp32 at load and gain neither"
            )
        return f"gains {gains}: weights take {taken}; {listed(parts)}"


def on_cpu(manifest: Manifest) -> OnCpu | None:
    """Return what a CPU gains; None if no ONNX profile is for it, or no weight is stored."""
    if manifest.profiles.keys().isdisjoint({"cpu", "cpu-bf16"}):
        return None
    return shares(manifest.plan, manifest.tensors)


def shares(plan: Plan, tensors: Iterable[TensorEntry]) -> OnCpu | None:
    """Return what becomes of ``tensors``, stored by ``plan``, on a CPU; None if profiles read none of them."""
    readers = {entry.name: entry.op for entry in plan.tensors if entry.code != "reference_only"}
    weights = [tensor for tensor in tensors if tensor.name in readers]
    narrow = [tensor for tensor in weights if tensor.dtype == "bfloat16"]
    recurrences = [entry for entry in plan.nodes.get("cpu", ()) if entry.op in _RECURRENT]
    # Exporters reorder the weights of recurrent layers by Slice and Concat, which the kernel's nodes make unnecessary.
    in_kernel = {*_RECURRENT, "Slice"} if all(entry.reason == RECURRED.reason for entry in recurrences) else set[str]()
    in_kernel = in_kernel if recurrences else set()
    in_panels = {2, *([3, 4] if "cpu-bf16" in plan.nodes else [])}  # ranks: convolutions are the kernel's there only
    panelled = [tensor.name for tensor in narrow if tensor.panels is not None and len(tensor.shape) in in_panels]
    upsampling = [entry.precision for entry in plan.nodes.get("cpu-bf16", ()) if entry.op == "ConvTranspose"]
    others = in_kernel | ({"ConvTranspose"} if {*upsampling} == {"bf16"} else set())
    kernels = [tensor for tensor in narrow if tensor.name in panelled or readers[tensor.name] in others]
    convolved = [tensor for tensor in kernels if len(tensor.shape) > 2 and readers[tensor.name] not in in_kernel]
    multiplied = [tensor for tensor in kernels if tensor not in convolved]
    looked_up = [tensor for tensor in narrow if tensor not in kernels and readers[tensor.name] == _LOOKUP]
    widened = [tensor for tensor in narrow if tensor not in kernels and tensor not in looked_up]
    whole = _elements(weights)
    if not whole:
        return None
    operators = _operators((readers[tensor.name] for tensor in widened), plan)
    first, second, third, rest = (_elements(tensors) / whole for tensors in (multiplied, convolved, looked_up, widened))
    return OnCpu(first, second, third, rest, operators)


def _elements(tensors: Iterable[TensorEntry]) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors)


def _operators(readers: Iterable[str], plan: Plan) -> tuple[str, ...]:
    """Return what reads the weights. Exporters reorder those of recurrent layers first, by Slice and Concat."""
    found = {name for text in readers for name in text.split(", ")}
    if moved := found & MOVEMENT:
        found -= moved
        found |= {entry.op for nodes in plan.nodes.values() for entry in nodes} & _RECURRENT or moved
    return tuple(sorted(found))
