"""Checks that a written graph rounds where its plan says, and nowhere else.

One rounding too many or too few moves a model's outputs by less than most budgets allow, so drift alone would not show
it. Users are shown the plan, and the report explains it, so the graph must match it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import onnx_ir as ir

from bf16kit.artifact.manifest import PlanEntry
from bf16kit.messages.errors import ConversionError
from bf16kit.runtime.ort.kernel import DOMAIN as KERNEL
from converter.fuse.functions import rounds_activations
from converter.graph.operators import SHAPE_ONLY, bf16_form, label

FLOAT, BFLOAT16 = ir.DataType.FLOAT, ir.DataType.BFLOAT16


def check_graph(path: Path, planned: Sequence[PlanEntry]) -> None:
    """Compare the graph at ``path`` with its profile's part of the plan.

    Raises :class:`ConversionError` that names the first node which rounds to bf16 where the plan does not, or computes
    in fp32 where the plan says bf16.
    """
    model = ir.load(path)
    precision = {entry.name: entry.precision for entry in planned}
    fault = next(_faults(model, precision), None)
    if fault is not None:
        raise ConversionError(
            f"{path.name}: {fault}; the graph does not follow the plan, and nothing was published. This is a bug in"
            " bf16-convert; please report it"
        )


def _faults(model: ir.Model, precision: Mapping[str, str]) -> Iterator[str]:
    opset = model.opset_imports[""]
    for node in model.graph:
        inserted = node.name not in precision
        if inserted and _casts(node, BFLOAT16):
            yield from (
                f"cast {node.name!r} rounds to bf16 for {reader.name!r}, which computes in fp32"
                for reader in _readers(node)
                if precision.get(reader.name or "") != "bf16" and reader.domain != KERNEL
            )
        elif node.domain == KERNEL and node.op_type.startswith(("MatMul", "Attention")):
            yield from _rounding(node, precision.get(node.name or "", "fp32"))
        elif not inserted and precision[node.name or ""] == "bf16" and node.domain != KERNEL:
            yield from _wide(node, opset)


def _rounding(product: ir.Node, planned: str) -> Iterator[str]:
    """Yield a fault if a product of the CPU kernel rounds its activations otherwise than the plan says.

    An attention node has the name of its product with the values.
    """
    if rounds_activations(product.op_type) != (planned == "bf16"):
        what = "not round its activations" if planned == "fp32" else "round its activations"
        yield f"product {product.name!r} should {what}, and is {label(product)}"


def _wide(node: ir.Node, opset: int) -> Iterator[str]:
    """Yield faults if ``node`` would compute in fp32, or reads a value that was not rounded."""
    form = bf16_form(node, opset)
    if form is None:
        yield f"node {node.name!r} is to compute in bf16, which {label(node)} cannot"
        return
    for index in form.inputs:
        value = node.inputs[index]
        if value is not None and value.dtype == FLOAT:
            yield f"node {node.name!r} is to compute in bf16, and its input {value.name!r} is fp32"
    for index in form.outputs:
        if node.outputs[index].dtype == FLOAT:
            yield f"node {node.name!r} is to compute in bf16, and its result {node.outputs[index].name!r} is fp32"


def _readers(node: ir.Node) -> Iterator[ir.Node]:
    """Yield the nodes that read the result of ``node`` as numbers, not only its shape."""
    return (use.node for use in node.outputs[0].uses() if use.node.op_type not in SHAPE_ONLY)


def _casts(node: ir.Node, dtype: ir.DataType) -> bool:
    return node.op_type == "Cast" and "to" in node.attributes and node.attributes["to"].as_int() == int(dtype)
