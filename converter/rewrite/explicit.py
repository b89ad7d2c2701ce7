"""Makes a source graph explicit: functions inlined, constants initializers of the main graph; drops what does nothing.

onnx-ir has passes of these names, which lose an output's name or a weight: docs/decisions/0008.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import (
    ClearMetadataAndDocStringPass,
    InlinePass,
    RemoveInitializersFromInputsPass,
    RemoveUnusedNodesPass,
)

from bf16kit.numerics.tensors import Array
from converter.graph.dimensions import GUESSED
from converter.graph.initializers import const, initializer, stays_inline
from converter.graph.names import FreshNames, replace_output, values_of
from converter.graph.step import Step


class InlineFunctions(Step):
    """Inline functions, and remove exporters' metadata: stack traces with paths of their machine, and docstrings.

    Ensures: no functions, no metadata; initializers are not inputs (files of IR version 3 list them as both).
    """

    name = "inline functions"

    def apply(self, model: ir.Model) -> bool:
        if model.functions:
            InlinePass()(model)
        ClearMetadataAndDocStringPass()(model)
        RemoveInitializersFromInputsPass()(model)
        for key in model.metadata_props.keys() - {GUESSED}:
            del model.metadata_props[key]
        for graph in model.graphs():
            for value in values_of(graph):
                value.metadata_props.clear()
        return True


class ConstantsToInitializers(Step):
    """Replace every Constant node by an initializer of its graph, in the main graph and in subgraphs.

    Ensures: no Constant node that holds a tensor or a number is left. Strings and sparse tensors stay, because they are
    no weights.
    """

    name = "constants to initializers"

    def apply(self, model: ir.Model) -> bool:
        modified = False
        for node in tuple(model.graph.all_nodes()):
            graph, tensor = node.graph, _tensor(node)
            if isinstance(graph, ir.Graph) and tensor is not None and node.outputs[0].name is not None:
                value = initializer(graph, node.outputs[0].name, tensor)
                node.outputs[0].replace_all_uses_with(value, replace_graph_outputs=True)
                graph.remove(node, safe=True)
                modified = True
        return modified


_NUMBERS = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}


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
        if name in _NUMBERS:
            return ir.tensor(np.asarray(attribute.value, dtype=_NUMBERS[name]), name=node.outputs[0].name)
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


class RemoveIdentities(Step):
    """Remove Identity, Dropout outside training, and Cast to the dtype a value already has, from the main graph.

    Each would only be a place for casts. Requires: types are known. A node between an input and an output of the graph
    stays, because both names belong to the model's interface.
    """

    name = "remove identities"

    def apply(self, model: ir.Model) -> bool:
        modified = False
        for node in tuple(model.graph):  # one at a time: removing one may leave the next between an input and an output
            source, output = node.inputs[0] if node.inputs else None, node.outputs[0] if node.outputs else None
            if source is None or output is None or not _changes_nothing(node, source):
                continue
            if not output.is_graph_output():
                output.replace_all_uses_with(source)
                model.graph.remove(node, safe=True)
            elif source.producer() is None or source.is_graph_output():
                continue
            else:
                source.shape = source.shape or output.shape  # inference may not see past other domains' operators
                replace_output(node, source)
            modified = True
        return modified


def _changes_nothing(node: ir.Node, source: ir.Value) -> bool:
    if node.domain == "" and node.op_type == "Cast":
        return source.dtype is not None and node.attributes["to"].as_int() == int(source.dtype)
    if node.domain == "" and node.op_type == "Dropout":
        mode = node.inputs[2] if len(node.inputs) > 2 else None
        told = const(mode)
        trains = mode is not None and (told is None or bool(told.numpy().any()))
        return not trains and not any(mask.uses() or mask.is_graph_output() for mask in node.outputs[1:])
    return node.domain == "" and node.op_type == "Identity"


class DropUnused(Step):
    """Remove nodes and initializers without a use, in the main graph and in subgraphs."""

    name = "drop what is unused"

    def apply(self, model: ir.Model) -> bool:
        return RemoveUnusedNodesPass()(model).modified


def floating_tensors(model: ir.Model) -> dict[str, Array]:
    """Return every tensor that an ONNX model holds, by name: initializers and Constant nodes, in functions too.

    For a conversion, they are the checkpoint of an ONNX file. If a name occurs again in another graph, a number is
    appended. Arrays of external data are memory-mapped. Shape constants (integers of at most 1 KiB) are no weights and
    are left out.
    """
    graphs = [*model.graphs()]
    for function in model.functions.values():
        graphs += [function.graph, *function.subgraphs()]
    named = [(name, value.const_value) for graph in graphs for name, value in graph.initializers.items()]
    constants = [(node, tensor) for graph in graphs for node in graph if (tensor := _tensor(node)) is not None]
    named += [(node.outputs[0].name or node.name or "constant", tensor) for node, tensor in constants]
    names = FreshNames()
    return {
        names.make(name): tensor.numpy()
        for name, tensor in named
        if tensor is not None
        and tensor.dtype != ir.DataType.STRING
        and (tensor.dtype.is_floating_point() or not stays_inline(tensor))
    }
