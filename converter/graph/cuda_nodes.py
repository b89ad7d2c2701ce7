"""Checks whether a release's CUDA provider has a kernel for each node of a written graph that reads or returns bf16."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import onnx
from onnx import defs

from converter.graph.cuda_support import BF16, KernelTable

_NAMES = {
    number: name.lower() for name, number in onnx.TensorProto.DataType.items()
}  # the table's names: bfloat16, float, int64


def missing_kernels(model: onnx.ModelProto, table: KernelTable) -> list[str]:
    """Describe the bf16 nodes for whose dtypes ``table`` has no kernel; [] if all have one.

    Nodes without bf16 are left out: if CUDA has no kernel for them, they run on the CPU, which has all of those. Nodes
    in subgraphs are left out too, because they stay in fp32. The graph must list its values' dtypes, as the converter
    writes them.
    """
    opsets = {entry.domain if entry.domain != "ai.onnx" else "": entry.version for entry in model.opset_import}
    dtypes = _dtypes(model.graph)
    wrong = []
    for node in model.graph.node:
        of_node = [dtypes.get(name, "") for name in (*node.input, *node.output)]
        if BF16 not in of_node:
            continue
        domain = "" if node.domain == "ai.onnx" else node.domain
        since, constraints = _version_and_dtypes(node, domain, opsets.get(domain, 1), dtypes)
        if not table.accepts_dtypes(domain, node.op_type, since, constraints):
            label = f"{domain}.{node.op_type}" if domain else node.op_type
            taken = ", ".join(f"{name} {dtype}" for name, dtype in sorted(constraints.items()))
            wrong.append(f"{node.name}: {label}-{since} of {taken}")
    return wrong


def _dtypes(graph: onnx.GraphProto) -> dict[str, str]:
    tensors = ((tensor.name, tensor.data_type) for tensor in graph.initializer)
    values = (*graph.value_info, *graph.input, *graph.output)
    typed = ((value.name, value.type.tensor_type.elem_type) for value in values)
    return {name: _NAMES[number] for name, number in (*tensors, *typed)}


def _version_and_dtypes(
    node: onnx.NodeProto, domain: str, opset: int, dtypes: Mapping[str, str]
) -> tuple[int, dict[str, str]]:
    """Return the version of the operator, and the dtype of each of its type constraints, by ONNX's schema.

    com.microsoft has no schemas here: the result is version 1 without constraints.
    """
    try:
        schema = defs.get_schema(node.op_type, opset, domain)
    except defs.SchemaError:
        return 1, {}
    pairs = (*_paired(schema.inputs, node.input), *_paired(schema.outputs, node.output))
    typed = {constraint: dtypes[name] for constraint, name in pairs if name in dtypes}
    return schema.since_version, {name: dtype for name, dtype in typed.items() if "(" not in name}  # no tensor(int64)


def _paired(formal: Iterable[defs.OpSchema.FormalParameter], names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the type constraint of each input or output, with its name; the last formal one may stand for several."""
    formals = list(formal)
    for index, name in enumerate(names):
        if name and formals:
            yield formals[min(index, len(formals) - 1)].type_str, name
