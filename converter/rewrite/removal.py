"""Removes nodes that change nothing at inference, each only a place for casts, and what is no longer used."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from converter.graph.initializers import const
from converter.graph.names import replace_output
from converter.graph.step import Step


class RemoveIdentities(Step):
    """Remove Identity, Dropout outside training, and Cast to the dtype a value already has, from the main graph.

    Requires: types are known. A node between an input and an output of the graph stays, because both names belong to
    the model's interface.
    """

    name = "remove identities"

    def apply(self, model: ir.Model) -> bool:
        modified = False
        for node in tuple(model.graph):
            if _changes_nothing(node):  # one at a time: removing one may leave the next between an input and an output
                _bypass(model.graph, node)
                modified = True
        return modified


def _changes_nothing(node: ir.Node) -> bool:
    if node.domain != "" or not node.inputs or node.inputs[0] is None:
        return False
    source, output = node.inputs[0], node.outputs[0]
    if output.is_graph_output() and (source.producer() is None or source.is_graph_output()):
        return False
    if node.op_type == "Identity":
        return True
    if node.op_type == "Cast":
        return source.dtype is not None and node.attributes["to"].as_int() == int(source.dtype)
    if node.op_type == "Dropout":
        mask_used = len(node.outputs) > 1 and (node.outputs[1].uses() or node.outputs[1].is_graph_output())
        return not mask_used and not _training(node)
    return False


def _training(node: ir.Node) -> bool:
    if len(node.inputs) < 3 or node.inputs[2] is None:
        return False
    mode = const(node.inputs[2])
    return mode is None or bool(mode.numpy().any())


def _bypass(graph: ir.Graph, node: ir.Node) -> None:
    source, output = node.inputs[0], node.outputs[0]
    if source is None:
        return
    if output.is_graph_output():
        if source.shape is None:  # inference may not see past operators of other domains, such as ai.onnx.ml
            source.shape = output.shape
        replace_output(node, source)
    else:
        output.replace_all_uses_with(source)
        graph.remove(node, safe=True)


class DropUnused(Step):
    """Remove nodes and initializers without a use, in the main graph and in subgraphs."""

    name = "drop what is unused"

    def apply(self, model: ir.Model) -> bool:
        return RemoveUnusedNodesPass()(model).modified
