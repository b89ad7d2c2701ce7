"""Inlines model-local functions, so that later steps need not look inside functions."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import ClearMetadataAndDocStringPass, InlinePass, RemoveInitializersFromInputsPass

from bf16kit.messages.errors import ConversionError
from converter.graph.guesses import GUESSED
from converter.graph.names import values_of
from converter.graph.operators import label, missing_input
from converter.graph.step import Step


class InlineFunctions(Step):
    """Inline functions, and remove exporters' metadata: stack traces with paths of their machine, and docstrings.

    Ensures: no functions, no metadata; initializers are not inputs (files of IR version 3 list them as both).
    """

    name = "inline functions"

    def apply(self, model: ir.Model) -> bool:
        if model.functions:
            InlinePass()(model)
            _check_inputs(model)
        ClearMetadataAndDocStringPass()(model)
        RemoveInitializersFromInputsPass()(model)
        for key in model.metadata_props.keys() - {GUESSED}:
            del model.metadata_props[key]
        for graph in model.graphs():
            for value in values_of(graph):
                value.metadata_props.clear()
        return True

    def ensures(self, model: ir.Model) -> None:
        if model.functions:
            names = ", ".join(sorted(f.name for f in model.functions.values()))
            raise ConversionError(f"functions are still there: {names}")


def _check_inputs(model: ir.Model) -> None:
    """Raise ConversionError if a node lacks a required input because the node that called its function left it out."""
    for node in model.graph.all_nodes():
        lacking = missing_input(node, model.opset_imports.get("", 0))
        if lacking is not None:
            raise ConversionError(
                f"{label(node)} {node.name or node.outputs[0].name!r} lacks its input {lacking!r}, because the node"
                " that calls its function does not pass it"
            )
