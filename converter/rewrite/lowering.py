"""Rewrites operators without a bf16 kernel on CUDA into operators with one."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from converter.graph.cuda_kernels import KernelTable
from converter.graph.initializers import initializer
from converter.graph.names import FreshNames, all_value_names, replace_output
from converter.graph.operators import since_version
from converter.graph.step import Step

_AXES_ARE_INPUTS = 18  # from this opset on, the axes of ReduceMean are an input


class LowerForCuda(Step):
    """Rewrite ``Clip(x, lo, hi)`` as ``Min(Max(x, lo), hi)``, and GlobalAveragePool as ReduceMean, which accumulates in
    fp32; both on fp32, if the table has no bf16 kernel for them.

    Requires: types are known; opset 11 or newer, where the bounds of Clip are inputs. A node stays if it is a Clip
    without bounds, or a GlobalAveragePool of unknown rank or of an opset older than 18.
    """

    name = "rewrite Clip and GlobalAveragePool"

    def __init__(self, kernels: KernelTable) -> None:
        super().__init__()
        self._kernels = kernels

    def apply(self, model: ir.Model) -> bool:
        opset = model.opset_imports[""]
        found = [node for node in model.graph if self._rewritable(node, opset)]
        fresh = FreshNames(all_value_names(model))
        for node in found:
            replace_output(node, _clip(node, fresh) if node.op_type == "Clip" else _mean(node, fresh))
        return bool(found)

    def _rewritable(self, node: ir.Node, opset: int) -> bool:
        source, output = node.inputs[0] if node.inputs else None, node.outputs[0] if node.outputs else None
        if node.domain != "" or source is None or output is None:
            return False
        if node.op_type == "Clip":
            possible = output.dtype == ir.DataType.FLOAT and any(bound is not None for bound in node.inputs[1:])
        elif node.op_type == "GlobalAveragePool":
            possible = opset >= _AXES_ARE_INPUTS and source.dtype == ir.DataType.FLOAT and source.shape is not None
        else:
            return False
        return possible and not self._kernels.has_bf16_kernel("", node.op_type, since_version(node, opset) or 0)


def _clip(node: ir.Node, fresh: FreshNames) -> ir.Value | None:
    current, output = node.inputs[0], node.outputs[0]
    for op, bound in zip(("Max", "Min"), node.inputs[1:], strict=False):
        if bound is not None:
            current = _insert(node, ir.node(op, [current, bound], name=f"{node.name}/{op.lower()}"))
            current.name, current.type, current.shape = (
                fresh.make(f"{node.name}/{op.lower()}"),
                output.type,
                output.shape,
            )
    return current


def _mean(node: ir.Node, fresh: FreshNames) -> ir.Value | None:
    source, output, graph = node.inputs[0], node.outputs[0], node.graph
    if source is None or source.shape is None or not isinstance(graph, ir.Graph):
        return None
    spatial = ir.tensor(np.arange(2, len(source.shape), dtype=np.int64))
    axes = initializer(graph, fresh.make(f"{node.name}/axes"), spatial)
    mean = _insert(node, ir.node("ReduceMean", [source, axes], attributes={"keepdims": 1}, name=f"{node.name}/mean"))
    mean.type, mean.shape = output.type, output.shape
    return mean


def _insert(before: ir.Node, added: ir.Node) -> ir.Value:
    if before.graph is not None:
        before.graph.insert_before(before, added)
    return added.outputs[0]
