"""The operators with bf16 kernels in CUDA providers that are not installed here, for each release of ONNX Runtime.

The table was read from the releases themselves, without a device: ``python -m bench.gpu.registry`` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from bf16kit.messages.errors import UsageError
from bf16kit.system.versions import is_older, version_key
from converter.process import versions

_FILE = "cuda_kernels.json"
BF16 = "bfloat16"
# The operators with kernels that a plan may narrow: they pass on the dtype of their data. Others take a dtype from an
# attribute (ConstantOfShape), run a subgraph (If), or need another floating type by their purpose.
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
# The newest opset and IR version that releases from the given one on load.
_ACCEPTS = (("1.25", 26, 13), ("1.24", 25, 13))


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel of a release: the versions of the operator that it covers, and the dtypes of each type constraint.

    ``last`` is 0 if it is open. ONNX Runtime then uses it for version ``first`` alone, because it knows no later one.
    """

    first: int
    last: int
    types: Mapping[str, frozenset[str]]

    def covers(self, since: int) -> bool:
        """Whether it covers version ``since`` of the operator."""
        return since == self.first or self.first < since <= self.last


@dataclass(frozen=True, slots=True)
class KernelTable:
    """The kernels of one release's CUDA provider that take bf16 anywhere, by (domain, operator).

    ``accepted_opset`` and ``accepted_ir`` are the newest that this ONNX Runtime loads at all.
    """

    onnxruntime: str
    accepted_opset: int
    accepted_ir: int
    kernels: Mapping[tuple[str, str], tuple[Kernel, ...]]

    @classmethod
    def load(cls, version: str | None = None) -> KernelTable:
        """Load the table of release ``version``; None means the installed release.

        If the installed release has no table, the newest table before it is used, else the oldest table. If none is
        installed, the newest table is used. Raises UsageError if there is no table for ``version``.
        """
        known = releases()
        if version is None:
            installed = versions.onnxruntime()
            within = [each for each in known if installed is None or not is_older(installed, each)]
            version = within[-1] if within else known[0]
        if version not in known:
            raise UsageError(
                f"no CUDA kernel table for ONNX Runtime {version}; there are tables for {', '.join(known)}"
            )
        return _table(version)

    def has_bf16_kernel(self, domain: str, op: str, since: int) -> bool:
        """Whether a plan may let version ``since`` of the operator compute in bf16."""
        return op in _PLANNED.get(domain, ()) and any(
            kernel.covers(since) for kernel in self.kernels.get((domain, op), ())
        )

    def accepts_dtypes(self, domain: str, op: str, since: int, dtypes: Mapping[str, str]) -> bool:
        """Whether a kernel runs version ``since`` on ``dtypes``, by type constraint; others may be any."""
        return any(
            kernel.covers(since) and all(dtype in kernel.types.get(name, {dtype}) for name, dtype in dtypes.items())
            for kernel in self.kernels.get((domain, op), ())
        )


def releases() -> tuple[str, ...]:
    """Return the releases that have a table, oldest first."""
    return tuple(sorted(_read()["releases"], key=version_key))


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


def other_release_note() -> str | None:
    """Return a sentence if the kernels come from another ONNX Runtime's table than the installed one's; else None."""
    table, installed = KernelTable.load().onnxruntime, versions.onnxruntime()
    if installed in (None, table):
        return None
    return (
        f"the cuda profile was planned with the bf16 kernels of ONNX Runtime {table}, because there is no kernel"
        f" table for the installed version {installed}"
    )
