"""Makes order and names of a translated graph reproducible: tf2onnx derives them from its objects' addresses."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from converter.graph.names import FreshNames, values_of

if TYPE_CHECKING:
    import onnx_ir as ir

_NUMBERS = re.compile(r"__\d+|(?<=einsum)\d+")  # numbers that tf2onnx appends, and addresses of its objects
_CALLS = re.compile(r"^((Stateful)?PartitionedCall(_\d+)?/)+")  # prefixes of functions that were inlined
_CONSTANT = "constant"

Key = tuple[str, ...]


def make_reproducible(model: ir.Model) -> None:
    """Order nodes by dependency and TensorFlow's name, and rename them and their values accordingly.

    Inputs and outputs, which clients see, keep their names. Constants are numbered, because tf2onnx gives them the name
    of any equal constant.
    """
    keys: dict[ir.Value, str] = {value: f"input {value.name}" for value in model.graph.inputs}
    for graph in list(model.graphs()):  # the main graph first, because subgraphs read its values
        _order(graph, keys)
    edges = {*model.graph.inputs, *model.graph.outputs}
    nodes = list(model.graph.all_nodes())
    used = [value for node in nodes for value in (*node.inputs, *node.outputs) if value is not None]
    declared = [value for graph in model.graphs() for value in values_of(graph)]
    ordered = [value for value in dict.fromkeys((*used, *declared)) if value not in edges and value.name]
    base_names = [_CONSTANT if value.is_initializer() else base_name(value.name or "") for value in ordered]
    for number, value in enumerate(ordered):  # temporary names, so that no two collide
        value.name = f"\0{number}"
    fresh = FreshNames(edge.name for edge in edges if edge.name)
    for value, name in zip(ordered, base_names, strict=True):
        value.name = fresh.make(name)
    fresh = FreshNames(())
    for node in nodes:
        node.name = fresh.make(base_name(node.name or node.op_type))
    for graph in model.graphs():
        for value in sorted(graph.initializers.values(), key=lambda value: value.name or ""):
            graph.register_initializer(graph.initializers.pop(value.name or ""))


def base_name(name: str) -> str:
    """Return ``name`` without parts that carry no information."""
    return _CALLS.sub("", _NUMBERS.sub("", name)) or "value"


def _order(graph: ir.Graph, keys: dict[ir.Value, str]) -> None:
    """Sort the nodes of ``graph`` topologically; among those that are ready, by name, then by what they read.

    ``keys`` identifies values that were seen already; constants are identified by their content.
    """
    for value in graph.inputs:
        keys.setdefault(value, f"input {value.name}")
    for value in graph.initializers.values():
        keys[value] = _content(value)
    own = {output: node for node in graph for output in node.outputs}
    waits = {node: {own[value] for value in _read(node) if value in own} for node in graph}
    readers: dict[ir.Node, list[ir.Node]] = {node: [] for node in graph}
    for node, before in waits.items():
        for other in before:
            readers[other].append(node)
    position = {node: index for index, node in enumerate(graph)}
    ready = [(_key(node, keys), position[node], node) for node, before in waits.items() if not before]
    heapq.heapify(ready)
    ordered: list[ir.Node] = []
    while ready:
        _, _, node = heapq.heappop(ready)
        for index, output in enumerate(node.outputs):
            keys[output] = f"{len(ordered):09d} {index}"
        ordered.append(node)
        for reader in readers[node]:
            waits[reader].discard(node)
            if not waits[reader]:
                heapq.heappush(ready, (_key(reader, keys), position[reader], reader))
    if len(ordered) < len(position):
        return  # a cycle, which the check of the graph reports
    graph.remove(ordered)
    graph.extend(ordered)


def _key(node: ir.Node, keys: dict[ir.Value, str]) -> Key:
    read = ("" if value is None else keys.get(value, "") for value in node.inputs)
    attributes = sorted(f"{name}={attribute.value}" for name, attribute in node.attributes.items() if _small(attribute))
    return (base_name(node.name or ""), node.op_type, *read, *attributes)


def _small(attribute: ir.Attr) -> bool:
    return attribute.type.name in ("INT", "INTS", "FLOAT", "FLOATS", "STRING", "STRINGS")


def _content(value: ir.Value) -> str:
    from converter.graph.equality import fingerprint

    tensor = value.const_value
    return "" if tensor is None else f"constant {fingerprint(tensor.numpy())}"


def _read(node: ir.Node) -> Iterator[ir.Value]:
    """Yield the values that ``node`` reads, and that its subgraphs read or return."""
    yield from (value for value in node.inputs if value is not None)
    for attribute in node.attributes.values():
        if attribute.type.name == "GRAPH":
            body = attribute.as_graph()
            yield from body.outputs
            for inner in body:
                yield from _read(inner)
