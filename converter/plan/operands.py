"""Finds constants that data meets element by element: positions, grids of anchors, angles, decays, biases of attention.

bf16 saves neither time nor memory where ONNX Runtime adds or multiplies them: it widens them at load. And it costs what
no product would lose. An angle of 2,000 would be wrong by 4, an anchor at 1,000 pixels by 2: so at long sequences and
in large images, which samples may not contain.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from bf16kit.converter.graph.operators import MOVEMENT

_PERIODIC = frozenset({"Cos", "Sin"})
_ELEMENTWISE = _PERIODIC | {"Add", "Div", "Exp", "Mul", "Neg", "Sub"}


def operands(graph: ir.Graph) -> set[str]:
    """Return the names of the initializers that are read element by element only.

    They may be moved, or combined with other constants, before. Rows that Gather looks up are an embedding, unless
    sines or cosines are taken of them.
    """
    constants: set[ir.Value | None] = {None, *graph.initializers.values()}
    for node in graph:
        if constants.issuperset(node.inputs):
            constants.update(node.outputs)
    found = set[ir.Node]()  # the nodes that read element by element
    for node in reversed([*graph.all_nodes()]):  # readers first
        if node.domain == "" and _meets(node, constants, found):
            found.add(node)
    return {name for name, value in graph.initializers.items() if _is_read_by(value, found)}


def _meets(node: ir.Node, constants: Collection[ir.Value | None], found: Collection[ir.Node]) -> bool:
    if node.op_type == "Gather":
        reading = [use.node.op_type for use in node.outputs[0].uses()]
        return bool(reading) and _PERIODIC.issuperset(reading)
    if node.op_type in MOVEMENT or (node.op_type in _ELEMENTWISE and node.outputs[0] in constants):
        return all(_is_read_by(output, found) for output in node.outputs)
    return node.op_type in _ELEMENTWISE


def _is_read_by(value: ir.Value, nodes: Collection[ir.Node]) -> bool:
    readers = [use.node for use in value.uses()]
    return bool(readers) and all(node in nodes for node in readers)
