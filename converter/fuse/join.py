"""Joins the kernel's products that read the same activations into one node: waking the threads costs 20 µs per node."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from bf16kit.runtime.ort.kernel import DOMAIN
from converter.fuse.fusing import Fusing
from converter.fuse.joined import JOINABLE, MOST, JoinedVariant, attributes, function


def groups(graph: ir.Graph) -> list[list[ir.Node]]:
    """Return the products that may be joined, two or three at a time, by what they read; in graph order.

    Not joined: products with an activation, with a weight that is not in whole panels, or with a bias that is not
    computed from constants alone.
    """
    alike: dict[tuple[ir.Value | None, str], list[ir.Node]] = {}
    for node in graph:
        if node.domain == DOMAIN and node.op_type in JOINABLE and all(map(_constant, node.inputs[1:])):
            alike.setdefault((node.inputs[0], node.op_type), []).append(node)
    found = [nodes[first : first + MOST] for nodes in alike.values() for first in range(0, len(nodes), MOST)]
    return [group for group in found if len(group) > 1]


def _constant(value: ir.Value | None) -> bool:
    """Whether ``value`` is an initializer, or one reshaped for a single reader, as biases of several dimensions are.

    With a second reader, that reader might stand before the place to which the Reshape is moved.
    """
    if value is None or value.is_initializer():
        return value is not None
    producer = value.producer()
    if producer is None or producer.op_type != "Reshape" or producer.domain != "" or len(value.uses()) != 1:
        return False
    return all(each is not None and each.is_initializer() for each in producer.inputs)


def join(fusing: Fusing, group: Sequence[ir.Node]) -> None:
    """Replace ``group``, such as query, key and value, by one node in the first one's place, under its name.

    Its outputs take the names of the products' outputs.
    """
    first = group[0]
    joined = JoinedVariant(len(group), *JOINABLE[first.op_type])
    inputs = [first.inputs[0], *(node.inputs[1] for node in group)]
    if joined.bias:
        inputs += [node.inputs[2] for node in group]
    for value in inputs[1:]:
        producer = None if value is None else value.producer()
        if producer is not None:  # it reads only constants, so it may move to any earlier place
            fusing.graph.remove(producer)
            fusing.graph.insert_before(first, producer)
    sizes = attributes(first.attributes["k"].as_int(), [node.attributes["n"].as_int() for node in group])
    defined = function(joined, fusing.opset)
    outputs = fusing.operator(defined, inputs, sizes, first, name=first.name, outputs=len(group))
    fusing.replace({node.outputs[0]: output for node, output in zip(group, outputs, strict=True)}, group)
