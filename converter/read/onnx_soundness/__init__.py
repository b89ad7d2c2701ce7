"""Checks that an ONNX file is consistent: tensors as long as their shapes, values defined once, nodes as specified.

Libraries read tensors on first use and trust the file's declarations. An inconsistency would show late, as another
error, or never.
"""

from __future__ import annotations

from pathlib import Path

from onnx import ModelProto

from converter.read.onnx_soundness.nodes import check_node
from converter.read.onnx_soundness.tensors import check_tensor
from converter.read.onnx_soundness.termination import check_ends
from converter.read.onnx_soundness.texts import check_texts
from converter.read.onnx_soundness.values import check_declared, check_functions, check_names, check_outputs
from converter.read.onnx_soundness.walk import Schemas, graphs, nodes


def check(path: Path, model: ModelProto) -> None:
    """Raise :class:`SourceError` naming a tensor, value, node or attribute that is inconsistent.

    Raises :class:`ConversionError` for a Loop, Range or tensor that is unreasonably large, and for a
    subgraph that returns a value of an outer graph.
    """
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
