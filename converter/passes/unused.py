"""Initializers that nothing uses any more: folded statistics, replaced biases."""

from __future__ import annotations

import onnx_ir as ir

from converter.graph.step import Step


class DropUnused(Step):
    """Remove initializers of the main graph without a use."""

    name = "drop unused initializers"

    def apply(self, model: ir.Model) -> bool:
        unused = [n for n, v in model.graph.initializers.items() if not v.uses() and not v.is_graph_output()]
        for name in unused:
            model.graph.initializers.pop(name)
        return bool(unused)
