"""Names of a translated graph that are the same on every run: tf2onnx numbers what it makes in an order of its own."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from converter.graph.names import FreshNames, values_of

if TYPE_CHECKING:
    import onnx_ir as ir

_NUMBERS = re.compile(r"__\d+")  # what tf2onnx appends
_CALLS = re.compile(r"^((Stateful)?PartitionedCall(_\d+)?/)+")  # where a function was that is no more


def settle(model: ir.Model) -> None:
    """Name nodes and values anew, by what TensorFlow called them and by where they come in the graph.

    What clients see, inputs and outputs, keeps its name.
    """
    edges = [*model.graph.inputs, *model.graph.outputs]
    nodes = list(model.graph.all_nodes())
    used = [value for node in nodes for value in (*node.inputs, *node.outputs) if value is not None]
    declared = [value for graph in model.graphs() for value in values_of(graph)]
    ordered = [value for value in dict.fromkeys((*used, *declared)) if value not in edges and value.name]
    wanted = [_plain(value.name or "") for value in ordered]
    for number, value in enumerate(ordered):  # first out of each other's way
        value.name = f"\0{number}"
    fresh = FreshNames(edge.name for edge in edges if edge.name)
    for value, name in zip(ordered, wanted, strict=True):
        value.name = fresh.make(name)
    fresh = FreshNames(())
    for node in nodes:
        node.name = fresh.make(_plain(node.name or node.op_type))
    for graph in model.graphs():
        for value in sorted(graph.initializers.values(), key=lambda value: value.name or ""):
            graph.register_initializer(graph.initializers.pop(value.name or ""))


def _plain(name: str) -> str:
    return _CALLS.sub("", _NUMBERS.sub("", name)) or "value"
