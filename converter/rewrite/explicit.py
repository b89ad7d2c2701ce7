"""Makes a source graph explicit: functions inlined, every constant an initializer of the main graph.

onnx-ir has passes of these names, which lose an output's name or a weight: docs/decisions/0008.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import ClearMetadataAndDocStringPass, InlinePass, RemoveInitializersFromInputsPass

from bf16kit.messages.errors import ConversionError
from converter.graph.dimensions import GUESSED
from converter.graph.initializers import initializer, stays_inline
from converter.graph.names import FreshNames, values_of
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


class ConstantsToInitializers(Step):
    """Replace every Constant node by an initializer of its graph, in the main graph and in subgraphs.

    Ensures: no Constant node that holds a tensor or a number is left. Strings and sparse tensors stay, because they are
    no weights.
    """

    name = "constants to initializers"

    def apply(self, model: ir.Model) -> bool:
        found = [node for node in model.graph.all_nodes() if _tensor(node) is not None]
        for node in found:
            _lift(node)
        return bool(found)


def _lift(node: ir.Node) -> None:
    graph, output = node.graph, node.outputs[0]
    tensor = _tensor(node)
    if not isinstance(graph, ir.Graph) or tensor is None or output.name is None:
        return
    value = initializer(graph, output.name, tensor)
    output.replace_all_uses_with(value, replace_graph_outputs=True)
    graph.remove(node, safe=True)


def _tensor(node: ir.Node) -> ir.TensorProtocol | None:
    """Return what a Constant node holds, as a tensor.

    None for other nodes, strings, sparse tensors, attributes set by a function's caller, and nodes without an output.
    """
    if node.op_type != "Constant" or node.domain not in ("", "ai.onnx") or not node.outputs:
        return None
    for name, attribute in node.attributes.items():
        if attribute.is_ref():
            return None
        if name == "value":
            return attribute.as_tensor()
        if name in ("value_float", "value_floats"):
            return ir.tensor(np.asarray(attribute.value, dtype=np.float32), name=node.outputs[0].name)
        if name in ("value_int", "value_ints"):
            return ir.tensor(np.asarray(attribute.value, dtype=np.int64), name=node.outputs[0].name)
    return None


class HoistInitializers(Step):
    """Move every initializer of a body to the main graph; insert an Identity where one is a graph output.

    Both branches of an If often call their weight ``weight``, so a name that occurs twice is made unique. ONNX
    Runtime's ``add_external_initializers``, which feeds the reference, knows only initializers of the main graph.
    Requires: constants are initializers. Ensures: bodies hold no initializers; no initializer is an output.
    """

    name = "hoist initializers out of bodies"

    def apply(self, model: ir.Model) -> bool:
        uses = Counter(v.name for graph in model.graphs() for v in values_of(graph) if v.name)
        fresh = FreshNames(uses)
        count = 0
        for graph in model.graphs():
            for name, value in tuple(graph.initializers.items()):
                if value.is_graph_output():
                    _separate_from_output(graph, value, fresh)
                if graph is not model.graph:
                    graph.initializers.pop(value.name or name)
                    if value.name == name and uses[name] > 1:
                        value.name = fresh.make(name)
                    model.graph.register_initializer(value)
                    count += 1
        return bool(count)


def _separate_from_output(graph: ir.Graph, value: ir.Value, fresh: FreshNames) -> None:
    """Make an Identity produce the output under its own name; the initializer takes a new name."""
    name = value.name or "output"
    identity = ir.node("Identity", [value], name=fresh.make(f"{name}/identity"))
    output = identity.outputs[0]
    output.type, output.shape = value.type, value.shape
    for index, existing in enumerate(graph.outputs):
        if existing is value:
            graph.outputs[index] = output
    graph.append(identity)
    value.name = fresh.make(f"{name}.value")
    output.name = name


def floating_tensors(model: ir.Model) -> dict[str, NDArray[Any]]:
    """Return every tensor that an ONNX model holds, by name: initializers and Constant nodes, in functions too.

    For a conversion, they are the checkpoint of an ONNX file. If a name occurs again in another graph, a number is
    appended. Arrays of external data are memory-mapped. Shape constants (integers of at most 1 KiB) are no weights and
    are left out.
    """
    tensors: dict[str, NDArray[Any]] = {}
    graphs = [*model.graphs()]
    for function in model.functions.values():
        graphs += [function.graph, *function.subgraphs()]
    for graph in graphs:
        for name, value in graph.initializers.items():
            if value.const_value is not None:
                _add(tensors, name, value.const_value)
    for node in (node for graph in graphs for node in graph):
        tensor = _tensor(node)
        if tensor is not None:
            _add(tensors, node.outputs[0].name or node.name or "constant", tensor)
    return tensors


def _add(tensors: dict[str, NDArray[Any]], name: str, tensor: ir.TensorProtocol) -> None:
    if tensor.dtype == ir.DataType.STRING or (not tensor.dtype.is_floating_point() and stays_inline(tensor)):
        return
    unique, count = name, 0
    while unique in tensors:
        count += 1
        unique = f"{name}_{count}"
    tensors[unique] = tensor.numpy()
