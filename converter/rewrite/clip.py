"""Rewrites Clip, which has no bf16 kernel on CUDA, as Max and Min, which have one."""

from __future__ import annotations

import onnx_ir as ir

from converter.graph.names import FreshNames
from converter.graph.operators import since_version
from converter.rewrite.rewriting import Rewrite, replace_output


class ClipToMinMax(Rewrite):
    """Rewrite ``Clip(x, lo, hi)`` on fp32 as ``Min(Max(x, lo), hi)``; both are exact.

    Requires: opset 11 or newer, where the bounds are inputs. For a missing bound, its node is left out; a Clip without
    bounds stays.
    """

    name = "rewrite Clip as Min and Max"

    def rewritable(self, node: ir.Node, opset: int) -> bool:
        if node.op_type != "Clip" or node.domain != "" or node.outputs[0].dtype != ir.DataType.FLOAT:
            return False
        if all(bound is None for bound in node.inputs[1:]):
            return False
        return not self.kernels.has_bf16_kernel("", "Clip", since_version(node, opset) or 0)

    def rewrite(self, graph: ir.Graph, node: ir.Node, fresh: FreshNames) -> None:
        current, output = node.inputs[0], node.outputs[0]
        bounds = [b for b in zip(("Max", "Min"), node.inputs[1:], strict=False) if b[1] is not None]
        for op, bound in bounds:
            name = f"{node.name}/{op.lower()}"
            added = ir.node(op, [current, bound], name=name)
            graph.insert_before(node, added)
            current = added.outputs[0]
            current.name, current.type, current.shape = fresh.make(name), output.type, output.shape
        replace_output(graph, node, current)
