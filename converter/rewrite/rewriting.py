"""The base of steps that rewrite an operator without a bf16 kernel into operators with one."""

from __future__ import annotations

from abc import abstractmethod

import onnx_ir as ir

from converter.graph.cuda_support import KernelTable
from converter.graph.names import FreshNames, all_value_names
from converter.graph.step import Step


class Rewrite(Step):
    """A step that finds the nodes it can rewrite, then rewrites each."""

    def __init__(self, kernels: KernelTable) -> None:
        super().__init__()
        self.kernels = kernels

    def apply(self, model: ir.Model) -> bool:
        opset = model.opset_imports[""]
        found = [node for node in model.graph if self.rewritable(node, opset)]
        fresh = FreshNames(all_value_names(model))
        for node in found:
            self.rewrite(model.graph, node, fresh)
        return bool(found)

    @abstractmethod
    def rewritable(self, node: ir.Node, opset: int) -> bool: ...

    @abstractmethod
    def rewrite(self, graph: ir.Graph, node: ir.Node, fresh: FreshNames) -> None:
        """Replace ``node`` by other nodes; ``fresh`` makes unused names."""


def replace_output(graph: ir.Graph, node: ir.Node, replacement: ir.Value | None) -> None:
    """Make ``replacement`` replace ``node``'s only output, under its name, and remove the node."""
    output = node.outputs[0]
    if replacement is None:
        return
    name = output.name
    output.replace_all_uses_with(replacement, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    output.name = None
    replacement.name = name
