"""Removes what is no longer used: folded statistics, replaced biases, nodes whose outputs are not read."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from converter.graph.step import Step


class DropUnused(Step):
    """Remove nodes and initializers without a use, in the main graph and in subgraphs."""

    name = "drop what is unused"

    def apply(self, model: ir.Model) -> bool:
        return RemoveUnusedNodesPass()(model).modified
