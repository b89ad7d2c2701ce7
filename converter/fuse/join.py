"""Joins the kernel's products that read the same activations into one node: waking the threads costs 20 µs per node."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from bf16kit.runtime.ort.kernel import DOMAIN
from converter.fuse.functions import FunctionBody, Fusing, ProductVariant, lists, stem
from converter.fuse.unpanel import matrix_nodes

MOST = 3  # products in one node


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


@dataclass(frozen=True, slots=True)
class JoinedVariant:
    """An operator of ``count`` products, 2 to :data:`MOST`, all with a bias or all without; ``rounds`` is as in
    :class:`~converter.fuse.functions.ProductVariant`."""

    count: int
    bias: bool
    rounds: bool = False

    @property
    def op_type(self) -> str:
        """The operator's name, such as ``MatMul3_panels_bias``; kernels/ort/operators.cpp registers them all."""
        return f"{stem(self.count, self.rounds)}_panels{'_bias' if self.bias else ''}"


def _single(bias: bool, rounds: bool) -> str:
    return ProductVariant("panels", ("panels", "matrix"), bias, "none", rounds).op_type


# The operators of single products that may be joined, with whether each has a bias and whether it rounds.
JOINABLE = {_single(bias, rounds): (bias, rounds) for bias, rounds in itertools.product((False, True), (False, True))}


def attributes(k: int, columns: Sequence[int]) -> dict[str, int | list[int]]:
    """Return the attributes of a node with products of [k, n], one n for each of ``columns``: ``k``, ``n1`` and so on.

    Only its function reads the lists, as those of :func:`converter.fuse.functions.lists`.
    """
    found: dict[str, int | list[int]] = {"k": k}
    for position, n in enumerate(columns, 1):
        found[f"n{position}"] = n
        found |= {f"{name}{position}": sizes for name, sizes in lists("panels", k, n).items()}
    return found


def function(joined: JoinedVariant, opset: int) -> ir.Function:
    """Return the function of ``joined`` in the operators of ``opset``, 13 or newer.

    X [..., k], W1, W2 … (k·n1, k·n2 … in whole panels), and the biases B1 [n1], B2 [n2] … if they have one
    → Y1 [..., n1], Y2 [..., n2] …
    """
    positions = range(1, joined.count + 1)
    x = ir.Value(name="X")
    weights = [ir.Value(name=f"W{position}") for position in positions]
    biases = [ir.Value(name=f"B{position}") for position in positions if joined.bias]
    body, outputs, names = FunctionBody(opset), [], ["k"]
    activations = body.rounded(x) if joined.rounds else x
    for position, weight in zip(positions, weights, strict=True):
        attribute_names = {name: f"{name}{position}" for name in ("panels", "matrix")}
        names += [f"n{position}", *attribute_names.values()]
        body.extend(
            matrix_nodes(
                weight, {name: body.integers_attribute(attribute) for name, attribute in attribute_names.items()}
            )
        )
        bias = biases[position - 1] if joined.bias else None
        outputs.append(body.product(activations, body.nodes[-1].outputs[0], bias))
    for position, output in zip(positions, outputs, strict=True):
        output.name = f"Y{position}"
    return body.function(joined.op_type, [x, *weights, *biases], outputs, names)
