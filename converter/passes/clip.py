"""Clip has no bf16 kernel on CUDA; Max and Min have."""

from __future__ import annotations

import onnx_ir as ir

from converter.kernels import KernelTable
from converter.operators import since_version
from converter.passes.names import FreshNames, all_value_names
from converter.passes.step import Step


class ClipToMinMax(Step):
    """Rewrite ``Clip(x, lo, hi)`` on fp32 as ``Min(Max(x, lo), hi)``; both are exact.

    Requires: opset 11 or newer, where the bounds are inputs. A bound that is missing loses its node; a Clip without
    bounds stays.
    """

    name = "rewrite Clip as Min and Max"

    def __init__(self, kernels: KernelTable) -> None:
        super().__init__()
        self._kernels = kernels

    def apply(self, model: ir.Model) -> bool:
        opset = model.opset_imports[""]
        found = [node for node in model.graph if self._rewritable(node, opset)]
        fresh = FreshNames(all_value_names(model))
        for node in found:
            _rewrite(model.graph, node, fresh)
        return bool(found)

    def _rewritable(self, node: ir.Node, opset: int) -> bool:
        if node.op_type != "Clip" or node.domain != "" or node.outputs[0].dtype != ir.DataType.FLOAT:
            return False
        if all(bound is None for bound in node.inputs[1:]):
            return False
        return not self._kernels.has("", "Clip", since_version(node, opset) or 0)


def _rewrite(graph: ir.Graph, clip: ir.Node, fresh: FreshNames) -> None:
    current, output = clip.inputs[0], clip.outputs[0]
    bounds = [b for b in zip(("Max", "Min"), clip.inputs[1:], strict=False) if b[1] is not None]
    for op, bound in bounds:
        name = f"{clip.name}/{op.lower()}"
        node = ir.node(op, [current, bound], name=name)
        graph.insert_before(clip, node)
        current = node.outputs[0]
        current.name, current.type, current.shape = fresh.make(name), output.type, output.shape
    replace_output(graph, clip, current)


def replace_output(graph: ir.Graph, node: ir.Node, replacement: ir.Value | None) -> None:
    """Let ``replacement`` take the place and the name of ``node``'s only output, and remove the node."""
    output = node.outputs[0]
    if replacement is None:
        return
    name = output.name
    output.replace_all_uses_with(replacement, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    output.name = None
    replacement.name = name
