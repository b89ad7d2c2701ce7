"""Whether an ONNX file holds what it says it holds: every tensor as long as its shape, every value given once, every
node as its operator is made.

Libraries below read tensors when they are first used and trust what the file says of them, so that a lie would come out
late, as an error about something else, or not at all.
"""

from __future__ import annotations

from pathlib import Path

from onnx import ModelProto

from converter.sources.onnx_soundness.endings import check_ends
from converter.sources.onnx_soundness.nodes import check_node
from converter.sources.onnx_soundness.tensors import check_tensor
from converter.sources.onnx_soundness.texts import check_texts
from converter.sources.onnx_soundness.values import check_declared, check_functions, check_names, check_outputs
from converter.sources.onnx_soundness.walk import Schemas, graphs, nodes


def check(path: Path, model: ModelProto) -> None:
    """Raise :class:`~bf16kit.errors.SourceError` naming the tensor, value, node or attribute that is not as ``model``
    says, and :class:`~bf16kit.errors.ConversionError` for a Loop that never ends."""
    check_texts(path, model)
    check_functions(path, model)
    for graph in graphs(model):
        check_names(path, graph)
        for tensor in graph.initializer:
            check_tensor(path, tensor)
        check_declared(path, graph)
    check_outputs(path, model)
    schemas = Schemas(model)
    for node, opsets in nodes(model):
        check_node(path, node, schemas.of(node, opsets))
    for graph in graphs(model):
        check_ends(path, graph)
