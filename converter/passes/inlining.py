"""Model-local functions become plain nodes: nothing after this looks inside a function."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import ClearMetadataAndDocStringPass, InlinePass, RemoveInitializersFromInputsPass

from bf16kit.errors import ConversionError
from converter.graph.names import values_of
from converter.graph.step import Step


class InlineFunctions(Step):
    """Inline functions, and drop what exporters leave behind: stack traces with their machine's paths, docstrings.

    Ensures: no functions, no metadata; initializers are not inputs (files of IR version 3 list them twice).
    """

    name = "inline functions"

    def apply(self, model: ir.Model) -> bool:
        if model.functions:
            InlinePass()(model)
        ClearMetadataAndDocStringPass()(model)
        RemoveInitializersFromInputsPass()(model)
        model.metadata_props.clear()
        for graph in model.graphs():
            for value in values_of(graph):
                value.metadata_props.clear()
        return True

    def ensures(self, model: ir.Model) -> None:
        if model.functions:
            names = ", ".join(sorted(f.name for f in model.functions.values()))
            raise ConversionError(f"functions are still there: {names}")
