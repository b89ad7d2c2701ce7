"""The bf16 kernels of CUDA providers that are not installed here, and the ONNX Runtime that a profile needs.

The table was read from the releases themselves, without a device (docs/decisions/0082).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import takewhile
from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnx import defs

from bf16kit.converter.graph.operators import label
from bf16kit.converter.process import program
from bf16kit.system import is_older, version_key

_FILE = "cuda_kernels.json"
# The operators with kernels that a plan may narrow: they pass on the dtype of their data. Others take a dtype from an
# attribute (ConstantOfShape), run a subgraph (If), or need another floating type by their purpose.
PLANNED: Mapping[str, frozenset[str]] = {
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
# The newest opset and IR version that each release loads, found by running the release; later releases load no newer
# ones. bf16kit installs with 1.24 and later.
_LOADS = (("1.24", 25, 13), ("1.25", 26, 13))


# The first and the last version of the operator that a kernel covers, and the dtypes of each type constraint. If the
# last is 0, ONNX Runtime uses the kernel for the first version alone, because it knows no later one.
_Kernel = tuple[int, int, Mapping[str, frozenset[str]]]


@dataclass(frozen=True, slots=True)
class KernelTable:
    """The kernels of one release's CUDA provider that take bf16 anywhere, by (domain, operator).

    ``accepted_opset`` and ``accepted_ir`` are the newest that this ONNX Runtime loads at all.
    """

    onnxruntime: str
    accepted_opset: int
    accepted_ir: int
    kernels: Mapping[tuple[str, str], tuple[_Kernel, ...]]

    @classmethod
    def load(cls, version: str | None = None) -> KernelTable:
        """Load the table of release ``version``; None means the installed release.

        If the installed release has no table, the newest table before it is used, else the oldest table. If none is
        installed, the newest table is used.
        """
        known = releases()
        if version is None:
            installed = program.onnxruntime()
            within = [each for each in known if installed is None or not is_older(installed, each)]
            version = within[-1] if within else known[0]
        return _table(version)

    def has_bf16_kernel(self, domain: str, op: str, since: int) -> bool:
        """Whether a plan may let version ``since`` of the operator compute in bf16."""
        return op in PLANNED.get(domain, ()) and self.accepts_dtypes(domain, op, since, {})

    def accepts_dtypes(self, domain: str, op: str, since: int, dtypes: Mapping[str, str]) -> bool:
        """Whether a kernel runs version ``since`` on ``dtypes``, by type constraint; others may be any."""
        return any(
            (since == first or first < since <= last)
            and all(dtype in types.get(name, {dtype}) for name, dtype in dtypes.items())
            for first, last, types in self.kernels.get((domain, op), ())
        )


def releases() -> tuple[str, ...]:
    """Return the releases that have a table, oldest first."""
    return tuple(sorted(_read()["releases"], key=version_key))


@cache
def _read() -> Any:
    return json.loads(resources.files("bf16kit.converter.graph").joinpath("data", _FILE).read_text(encoding="utf-8"))


@cache
def _table(version: str) -> KernelTable:
    data = _read()
    sets = [frozenset(each) for each in data["sets"]]
    kernels = {
        (domain, op): tuple(
            (first, last, {name: sets[number] for name, number in types.items()})
            for first, last, types, begin, end in rows
            if not is_older(version, begin) and not (end and is_older(end, version))
        )
        for domain, ops in data["kernels"].items()
        for op, rows in ops.items()
    }
    opset, ir_version = [most for begin, *most in _LOADS if not is_older(version, begin)][-1]
    return KernelTable(version, opset, ir_version, kernels)


def missing_kernels(model: ir.Model, table: KernelTable) -> list[str]:
    """Describe the bf16 nodes for whose dtypes ``table`` has no kernel; [] if all have one.

    Nodes without bf16 are left out: if CUDA has no kernel for them, they run on the CPU, which has all of those. Nodes
    in subgraphs are left out too, because they stay in fp32. The graph must list its values' dtypes, as the converter
    writes them.
    """
    wrong = []
    for node in model.graph:
        if any(value is not None and value.dtype == ir.DataType.BFLOAT16 for value in (*node.inputs, *node.outputs)):
            since, constraints = _version_and_dtypes(node, model.opset_imports.get(node.domain, 1))
            if not table.accepts_dtypes(node.domain, node.op_type, since, constraints):
                taken = ", ".join(f"{name} {dtype}" for name, dtype in sorted(constraints.items()))
                wrong.append(f"{node.name}: {label(node)}-{since} of {taken}")
    return wrong


def _version_and_dtypes(node: ir.Node, opset: int) -> tuple[int, dict[str, str]]:
    """Return the version of the operator, and the dtype of each of its type constraints, by ONNX's schema.

    com.microsoft has no schemas here: the result is version 1 without constraints.
    """
    try:
        schema = defs.get_schema(node.op_type, opset, node.domain)
    except defs.SchemaError:
        return 1, {}
    typed = {}
    for formal, values in ((schema.inputs, node.inputs), (schema.outputs, node.outputs)):
        for index, value in enumerate(values):
            if formal and value is not None and value.dtype is not None:  # the last formal one may stand for several
                typed[formal[min(index, len(formal) - 1)].type_str] = value.dtype.name.lower()  # as in the table
    return schema.since_version, {name: dtype for name, dtype in typed.items() if "(" not in name}  # no tensor(int64)


def required(profile: str, graphs: Sequence[Path], *, on_device: bool = False) -> dict[str, str]:
    """Return the lowest version of each package that runs ``profile``; ``graphs`` are its graph and its reference's.

    That is the oldest release that loads graphs of their opset and IR version. If no known release does, it is the
    installed one, which ran them. cuda also needs kernels: the first release from which on all known ones have a kernel
    for every bf16 node. If the installed release is older and ran the graph ``on_device``, it is that one.
    """
    models = [ir.load(path) for path in graphs]
    opset = max((model.opset_imports.get("", 0) for model in models), default=0)
    ir_version = max((model.ir_version for model in models), default=0)
    installed = program.onnxruntime()
    oldest_loading = next(
        (release for release, *most in _LOADS if opset <= most[0] and ir_version <= most[1]), installed
    )
    needed = [oldest_loading] if oldest_loading else []
    if profile == "cuda":
        tables = [KernelTable.load(release) for release in reversed(releases())]
        having = takewhile(lambda table: not any(missing_kernels(model, table) for model in models), tables)
        # If even the newest lacks one, it is the newest: running on a device will show whether it works.
        least = [tables[0], *having][-1].onnxruntime
        needed.append(min(least, installed, key=version_key) if on_device and installed else least)
    return {"onnxruntime": max(needed, key=version_key)} if needed else {}
