"""Which operators have bf16 kernels on a provider that is not installed here, release by release of ONNX Runtime.

The table was asked of the releases themselves, with no device: ``python -m bench.gpu.registry`` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from bf16kit.errors import UsageError
from bf16kit.versions import is_older, order
from converter.process import versions

_FILE = "cuda_kernels.json"
BF16 = "bfloat16"
# Of what has kernels, what a plan may narrow: what passes the data on that it was given. Others take a dtype from an
# attribute (ConstantOfShape), run a body (If), or are of another floating type by what they are for.
_PLANNED: Mapping[str, frozenset[str]] = {
    "": frozenset(
        {"Abs", "Add", "Attention", "AveragePool", "Cast", "Concat", "Conv", "Cos", "Div", "Erf", "Exp", "Expand"}
        | {"Flatten", "Gather", "GatherElements", "GatherND", "Gelu", "Gemm", "HardSigmoid", "HardSwish", "Identity"}
        | {"LayerNormalization", "MatMul", "Max", "Min", "Mul", "Neg", "Pow", "RMSNormalization", "ReduceMean"}
        | {"ReduceSum", "Relu", "Reshape", "RotaryEmbedding", "ScatterElements", "ScatterND", "Sigmoid", "Sin", "Slice"}
        | {"Softmax", "Split", "Sqrt", "Squeeze", "Sub", "Sum", "Tanh", "Tile", "TopK", "Transpose", "Trilu"}
        | {"Unsqueeze", "Where"}
    ),
    "com.microsoft": frozenset(
        {"Attention", "BiasGelu", "FastGelu", "FusedMatMul", "Gelu", "GroupQueryAttention", "MultiHeadAttention"}
        | {"QuickGelu", "SkipLayerNormalization"}
    ),
}
# The newest opset and IR version that a release loads, from the first of these on.
_ACCEPTS = (("1.25", 26, 13), ("1.24", 25, 13))


@dataclass(frozen=True, slots=True)
class Kernel:
    """One of a release's: the versions of the operator that it is for, and the dtypes of each of its type constraints.

    ``last`` is 0 where it is open: then ONNX Runtime takes it for version ``first`` alone, not knowing of later ones.
    """

    first: int
    last: int
    types: Mapping[str, frozenset[str]]

    def of(self, since: int) -> bool:
        """Whether it is for version ``since`` of the operator."""
        return since == self.first or self.first < since <= self.last


@dataclass(frozen=True, slots=True)
class KernelTable:
    """The kernels of ONNX Runtime's CUDA provider that take bf16 anywhere, in one release, by (domain, operator).

    ``accepted_opset`` and ``accepted_ir`` are the newest that this ONNX Runtime loads at all.
    """

    onnxruntime: str
    accepted_opset: int
    accepted_ir: int
    kernels: Mapping[tuple[str, str], tuple[Kernel, ...]]

    @classmethod
    def load(cls, version: str | None = None) -> KernelTable:
        """The table of release ``version``; for None that of the installed one, or of the newest before it, or of the
        first where it is older still, or of the newest where none is installed.

        UsageError when there is no table for ``version``.
        """
        known = releases()
        if version is None:
            installed = versions.onnxruntime()
            within = [each for each in known if installed is None or not is_older(installed, each)]
            version = within[-1] if within else known[0]
        if version not in known:
            raise UsageError(f"no CUDA kernel table for ONNX Runtime {version}; there are {', '.join(known)}")
        return _table(version)

    def has(self, domain: str, op: str, since: int) -> bool:
        """Whether a plan may have version ``since`` of the operator compute in bf16."""
        return op in _PLANNED.get(domain, ()) and any(kernel.of(since) for kernel in self.kernels.get((domain, op), ()))

    def takes(self, domain: str, op: str, since: int, dtypes: Mapping[str, str]) -> bool:
        """Whether a kernel runs version ``since`` on ``dtypes``, by type constraint; what it does not name is free."""
        return any(
            kernel.of(since) and all(dtype in kernel.types.get(name, {dtype}) for name, dtype in dtypes.items())
            for kernel in self.kernels.get((domain, op), ())
        )


def releases() -> tuple[str, ...]:
    """The releases that have a table, oldest first."""
    return tuple(sorted(_read()["releases"], key=order))


@cache
def _read() -> Any:
    return json.loads(resources.files("converter.graph.data").joinpath(_FILE).read_text(encoding="utf-8"))


@cache
def _table(version: str) -> KernelTable:
    data = _read()
    sets = [frozenset(each) for each in data["sets"]]
    kernels = {
        (domain, op): tuple(
            Kernel(first, last, {name: sets[number] for name, number in types.items()})
            for first, last, types, begin, end in rows
            if not is_older(version, begin) and not (end and is_older(end, version))
        )
        for domain, ops in data["kernels"].items()
        for op, rows in ops.items()
    }
    opset, ir_version = next(most for begin, *most in _ACCEPTS if not is_older(version, begin))
    return KernelTable(version, opset, ir_version, kernels)


def stand_in() -> str | None:
    """A sentence when the kernels of another ONNX Runtime than the installed one were looked up; None when not."""
    table, installed = KernelTable.load().onnxruntime, versions.onnxruntime()
    if installed in (None, table):
        return None
    return (
        f"which bf16 kernels CUDA has was read for ONNX Runtime {table}, and {installed} is installed, for which there"
        " is no table"
    )
