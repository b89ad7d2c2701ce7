"""Emulates the cuda profile on a CPU: every bf16 node is computed in fp32 and its result is rounded to bf16.

CUDA's bf16 kernels multiply exactly, accumulate in fp32 and round once at the end. The emulation does the same, except
for the order of the sums. It rounds by a Cast to bf16 and a Cast back. ONNX Runtime keeps such pairs with all
optimisations on, because the second Cast does not restore the first one's input (observed on 1.31.1, and checked by a
test).
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

import onnx_ir as ir

from converter.fuse.unpanel import PUT_TOGETHER
from converter.graph.names import FreshNames, all_value_names
from converter.graph.operators import EXACT
from converter.graph.step import Step, run
from converter.write.graphs import serialize

FLOAT, BFLOAT16 = ir.DataType.FLOAT, ir.DataType.BFLOAT16


def emulation(cuda_graph: Path) -> bytes:
    """Return the emulation of ``cuda_graph`` as an ONNX model; its weights are external data beside ``cuda_graph``.

    Raises :class:`ConversionError` if the graph holds bf16 where it cannot be emulated.
    """
    return serialize(run([Emulate()], ir.load(cuda_graph)))


class Emulate(Step):
    """Replace every bf16 value by an fp32 value that was rounded to bf16.

    Operators that only move or choose values need no rounding, because their inputs are bf16 values already. Nodes that
    put panels together still move bf16 weights, as in the cuda graph: widening first would double each copy. Ensures:
    only initializers, values put together from them, and values between two casts are bf16. Only Shape may also read
    those.
    """

    name = "emulate bf16"

    def apply(self, model: ir.Model) -> bool:
        graph, fresh = model.graph, FreshNames(all_value_names(model))
        moves = _moves_of_weights(graph)
        nodes = [node for node in graph if node not in moves and any(o.dtype == BFLOAT16 for o in node.outputs)]
        weights = [value for value in graph.initializers.values() if value.dtype == BFLOAT16]
        weights += [node.outputs[0] for node in moves]
        first = next((node for node in graph if node not in moves), None)
        for value in weights:
            readers = tuple(use for use in value.uses() if not (_widens(use.node) or use.node in moves))
            if readers and first is not None:
                cast = _cast(value, FLOAT, fresh)
                graph.insert_before(first, cast)
                for use in readers:
                    use.node.replace_input_with(use.idx, cast.outputs[0])
        for node in nodes:
            for output in node.outputs:
                if output.dtype == BFLOAT16:
                    _emulate(graph, node, output, fresh)
        return bool(nodes or weights)


def _moves_of_weights(graph: ir.Graph) -> dict[ir.Node, None]:
    """Return the leading nodes of ``graph`` that put its bf16 initializers together
    (:mod:`converter.fuse.unpanel`)."""
    moves: dict[ir.Node, None] = {}
    for node in graph:
        moved = node.op_type in PUT_TOGETHER and all(_is_constant(value, moves) for value in node.inputs)
        if not moved or node.outputs[0].dtype != BFLOAT16:
            break
        moves[node] = None
    return moves


def _is_constant(value: ir.Value | None, moves: Container[ir.Node | None]) -> bool:
    return value is not None and (value.is_initializer() or value.producer() in moves)


def _emulate(graph: ir.Graph, node: ir.Node, output: ir.Value, fresh: FreshNames) -> None:
    """Make every node that reads ``output`` read its rounded fp32 value instead."""
    narrowing = node.op_type == "Cast"
    if not narrowing:
        output.type = ir.TensorType(FLOAT)
        if node.op_type in EXACT:
            return
    readers = tuple(output.uses())
    last, rounded = node, output
    if not narrowing:
        last = _cast(output, BFLOAT16, fresh)
        rounded = last.outputs[0]
        graph.insert_after(node, last)
    back = _cast(rounded, FLOAT, fresh)
    graph.insert_after(last, back)
    for use in readers:
        use.node.replace_input_with(use.idx, back.outputs[0])


def _widens(node: ir.Node) -> bool:
    return node.op_type == "Cast" and node.outputs[0].dtype == FLOAT


def _cast(value: ir.Value, dtype: ir.DataType, fresh: FreshNames) -> ir.Node:
    name = fresh.make(f"{value.name}/{'rounded' if dtype == BFLOAT16 else 'emulated'}")
    node = ir.node("Cast", [value], attributes={"to": int(dtype)}, name=name)
    output = node.outputs[0]
    output.name, output.type, output.shape = name, ir.TensorType(dtype), value.shape
    return node
