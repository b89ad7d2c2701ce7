"""Joins the kernel's products that read the same activations into one node: waking the threads costs 20 µs per node."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from bf16kit.errors import ConversionError
from bf16kit.runtime.kernel import DOMAIN
from converter.fuse.functions import define
from converter.fuse.joined import JOINABLE, MOST, JoinedVariant, attributes, function
from converter.graph.step import Step
from converter.passes.rewriting import replace_output


class JoinProducts(Step):
    """Replace up to three products of one value, such as query, key and value, by one node in the first one's place.

    The node takes the first one's name, and its outputs the names of the products' outputs. Not joined: products with
    an activation, with a weight that is not in whole panels, or with a bias that is not computed from constants alone.

    Requires: the kernel's nodes are in the graph. Ensures: each of its operators that a node uses is defined, and no
    other.
    """

    name = "join products of the same activations"

    def apply(self, model: ir.Model) -> bool:
        groups = [group for group in _groups(model.graph) if len(group) > 1]
        if not groups:
            return False
        joined = dict.fromkeys(_join(model.graph, group) for group in groups)
        define(model, [function(each, model.opset_imports[""]) for each in joined])
        used = _operators(model.graph)
        for identifier in [each for each in model.functions if each[0] == DOMAIN and each[1] not in used]:
            del model.functions[identifier]
        return True

    def ensures(self, model: ir.Model) -> None:
        defined = {function.name for function in model.functions.values() if function.domain == DOMAIN}
        for operator in sorted(_operators(model.graph) ^ defined):
            raise ConversionError(f"operator {DOMAIN}.{operator} is not both used and defined")


def _operators(graph: ir.Graph) -> set[str]:
    return {node.op_type for node in graph.all_nodes() if node.domain == DOMAIN}


def _groups(graph: ir.Graph) -> list[list[ir.Node]]:
    """Return the products that may be joined, at most three at a time, by what they read; in graph order."""
    alike: dict[tuple[ir.Value | None, str], list[ir.Node]] = {}
    for node in graph:
        if node.domain == DOMAIN and node.op_type in JOINABLE and all(map(_constant, node.inputs[1:])):
            alike.setdefault((node.inputs[0], node.op_type), []).append(node)
    return [nodes[first : first + MOST] for nodes in alike.values() for first in range(0, len(nodes), MOST)]


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


def _join(graph: ir.Graph, group: Sequence[ir.Node]) -> JoinedVariant:
    """Replace ``group`` by one node, and return its operator."""
    first = group[0]
    joined = JoinedVariant(len(group), *JOINABLE[first.op_type])
    inputs = [first.inputs[0], *(node.inputs[1] for node in group)]
    if joined.bias:
        inputs += [node.inputs[2] for node in group]
    for value in inputs[1:]:
        producer = None if value is None else value.producer()
        if producer is not None:  # it reads only constants, so it may move to any earlier place
            graph.remove(producer)
            graph.insert_before(first, producer)
    sizes = attributes(first.attributes["k"].as_int(), [node.attributes["n"].as_int() for node in group])
    kernel_node = ir.node(joined.op_type, inputs, sizes, domain=DOMAIN, num_outputs=len(group), name=first.name)
    graph.insert_before(first, kernel_node)
    for node, value in zip(group, kernel_node.outputs, strict=True):
        old = node.outputs[0]
        value.type, value.shape = old.type, old.shape
        replace_output(graph, node, value)
    return joined
