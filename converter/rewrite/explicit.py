"""Makes a source graph explicit: functions inlined, all named, constants in the main graph, equal weights stored once.

onnx-ir has passes of these names, which lose an output's name or a weight: docs/decisions/0008.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import onnx_ir as ir
from onnx_ir.passes.common import (
    ClearMetadataAndDocStringPass,
    InlinePass,
    RemoveInitializersFromInputsPass,
    RemoveUnusedNodesPass,
)

from bf16kit.converter.graph.dimensions import GUESSED
from bf16kit.converter.graph.equality import Array, Fingerprint, fingerprint, same_bits
from bf16kit.converter.graph.initializers import const, initializer, stays_inline
from bf16kit.converter.graph.names import FreshNames, all_value_names, replace_output, values_of
from bf16kit.messages.errors import ConversionError


def inline_functions(model: ir.Model) -> None:
    """Inline functions, and remove exporters' metadata: stack traces with paths of their machine, and docstrings.

    Ensures: no functions, no metadata; initializers are not inputs (files of IR version 3 list them as both).
    """
    if model.functions:
        InlinePass()(model)
    ClearMetadataAndDocStringPass()(model)
    RemoveInitializersFromInputsPass()(model)
    for key in model.metadata_props.keys() - {GUESSED}:
        del model.metadata_props[key]
    for graph in model.graphs():
        for value in values_of(graph):
            value.metadata_props.clear()


def name_everything(model: ir.Model) -> None:
    """Name unnamed nodes and values; make node names unique over the whole model, value names over each graph.

    Names that are already unique do not change; others are the same on every run, because the plan, the report and
    ``--keep-fp32`` use them. Refuses a value that nothing gives: onnx_ir drops sparse initializers.
    """
    nodes = FreshNames(node.name for node in model.graph.all_nodes() if node.name)
    values = FreshNames(all_value_names(model))
    seen: set[str] = set()
    for position, node in enumerate(model.graph.all_nodes()):
        for value in node.inputs:
            if value is not None and not (value.producer() or value.is_graph_input() or value.is_initializer()):
                raise ConversionError(
                    f"node {node.name or node.op_type!r} reads {value.name!r}, which no node, input or"
                    " initializer gives; if it is a sparse initializer, make it dense"
                )
        if not node.name or node.name in seen:
            node.name = nodes.make(node.name or f"{node.op_type}_{position}")
        seen.add(node.name)
        for index, output in enumerate(node.outputs):
            if output.name is None:  # used or not: outputs are told apart by position, and "" is one left out
                output.name = values.make(f"{node.name}:{index}")


def constants_to_initializers(model: ir.Model) -> None:
    """Replace every Constant node by an initializer of its graph, in the main graph and in subgraphs.

    Ensures: no Constant node that holds a tensor or a number is left. Strings and sparse tensors stay, because they are
    no weights.
    """
    for node in tuple(model.graph.all_nodes()):
        graph, tensor = node.graph, _tensor(node)
        if isinstance(graph, ir.Graph) and tensor is not None and node.outputs[0].name is not None:
            value = initializer(graph, node.outputs[0].name, tensor)
            node.outputs[0].replace_all_uses_with(value, replace_graph_outputs=True)
            graph.remove(node, safe=True)


_HELD = frozenset({"value", "value_float", "value_floats", "value_int", "value_ints"})


def _tensor(node: ir.Node) -> ir.TensorProtocol | None:
    """Return what a Constant node holds, as a tensor.

    None for other nodes, strings, sparse tensors, attributes set by a function's caller, and nodes without an output.
    """
    if node.op_type != "Constant" or len(node.outputs) != 1 or not _HELD & node.attributes.keys():
        return None
    return ir.convenience.get_const_tensor(node.outputs[0])


def hoist_initializers(model: ir.Model) -> None:
    """Move every initializer of a body to the main graph; insert an Identity where one is a graph output.

    Both branches of an If often call their weight ``weight``, so a name that occurs twice is made unique. ONNX
    Runtime's ``add_external_initializers``, which feeds the reference, knows only initializers of the main graph.
    Requires: constants are initializers. Ensures: bodies hold no initializers; no initializer is an output.
    """
    uses = Counter(v.name for graph in model.graphs() for v in values_of(graph) if v.name)
    fresh = FreshNames(uses)
    for graph in model.graphs():
        for name, value in tuple(graph.initializers.items()):
            if value.is_graph_output():
                _separate_from_output(graph, value, fresh)
            if graph is not model.graph:
                graph.initializers.pop(value.name or name)
                if value.name == name and uses[name] > 1:
                    value.name = fresh.make(name)
                model.graph.register_initializer(value)


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


# By fingerprint. Tensors, not arrays: tensors computed on reading would otherwise all be in memory at once.
_Kept = dict[Fingerprint, list[tuple[ir.Value, ir.TensorProtocol]]]
_SMALLEST_BYTES = 1024  # sharing all-zero biases saves nothing, and they would lose their names


def share_equal_weights(model: ir.Model) -> None:
    """Store equal weights once; replace one that is another's transpose by a Transpose of the other.

    Exporters write tied embeddings twice, often one as the transpose of the other. Only fp32 and int64 initializers
    (tables of indices) with two or more dimensions and at least 1 KiB are compared. Transposing is exact, and ONNX
    Runtime does it once at load. Requires: initializers are in the main graph.
    """
    graph, fresh = model.graph, FreshNames(all_value_names(model))
    kept: _Kept = defaultdict(list)
    transposed: dict[ir.Value, ir.Value] = {}
    for value, tensor in _weights(graph):
        array = tensor.numpy()
        twin = _find(kept, array)
        mirrored = _find(kept, array.T) if twin is None and array.ndim == 2 else None
        if mirrored is not None:
            if mirrored not in transposed:
                transposed[mirrored] = _transpose(graph, mirrored, fresh)
            twin = transposed[mirrored]
        if twin is None:
            kept[fingerprint(array)].append((value, tensor))
        else:
            value.replace_all_uses_with(twin)
            graph.initializers.pop(value.name or "")


def _weights(graph: ir.Graph) -> list[tuple[ir.Value, ir.TensorProtocol]]:
    """Return the weights, tables first: rows are looked up as stored, and a product is as fast by a Transpose."""
    found = [
        (value, tensor)
        for value in graph.initializers.values()
        if (tensor := value.const_value) is not None
        and tensor.dtype in (ir.DataType.FLOAT, ir.DataType.INT64)
        and len(tensor.shape) >= 2
        and tensor.nbytes >= _SMALLEST_BYTES
    ]
    return sorted(found, key=lambda pair: all(use.node.op_type != "Gather" or use.idx for use in pair[0].uses()))


def _find(kept: _Kept, array: Array) -> ir.Value | None:
    found = (value for value, candidate in kept.get(fingerprint(array), ()) if same_bits(candidate.numpy(), array))
    return next(found, None)


def _transpose(graph: ir.Graph, value: ir.Value, fresh: FreshNames) -> ir.Value:
    name = f"{value.name}/transposed"
    node = ir.node("Transpose", [value], attributes={"perm": [1, 0]}, name=fresh.make(name))
    output = node.outputs[0]
    output.name, output.type = fresh.make(name), value.type
    output.shape = ir.Shape(tuple(reversed(value.shape or ())))
    graph.insert_before(graph[0], node)  # a node reads each of the two weights, so there is a first
    return output


def remove_identities(model: ir.Model) -> None:
    """Remove Identity, Dropout outside training, and Cast to the dtype a value already has, from the main graph.

    Each would only be a place for casts. Requires: types are known. A node between an input and an output of the graph
    stays, because both names belong to the model's interface.
    """
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


def _changes_nothing(node: ir.Node, source: ir.Value) -> bool:
    if node.domain != "":
        return False
    if node.op_type == "Cast":
        return source.dtype is not None and node.attributes["to"].as_int() == int(source.dtype)
    if node.op_type == "Dropout":
        mode = node.inputs[2] if len(node.inputs) > 2 else None
        told = const(mode)
        trains = mode is not None and (told is None or bool(told.numpy().any()))
        return not trains and not any(mask.uses() or mask.is_graph_output() for mask in node.outputs[1:])
    return node.op_type == "Identity"


def drop_unused(model: ir.Model) -> None:
    """Remove nodes and initializers without a use, in the main graph and in subgraphs."""
    RemoveUnusedNodesPass()(model)


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
