"""Emulates the cuda profile on a CPU: every bf16 node is computed in fp32 and its result is rounded to bf16.

CUDA's bf16 kernels multiply exactly, accumulate in fp32 and round once at the end. The emulation does the same, except
for the order of the sums. It rounds by a Cast to bf16 and a Cast back. ONNX Runtime keeps such pairs with all
optimisations on, because the second Cast does not restore the first one's input (observed on 1.31.1, and checked by a
test).
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from converter.fuse.fuse import PUT_TOGETHER
from converter.graph.names import FreshNames, all_value_names
from converter.graph.operators import EXACT
from converter.graph.types import Step, run
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
        others = [node for node in graph if node not in moves]
        weights = [value for value in graph.initializers.values() if value.dtype == BFLOAT16]
        weights += [node.outputs[0] for node in moves]
        narrow = [(node, output) for node in others for output in node.outputs if output.dtype == BFLOAT16]
        for value in weights if others else ():
            readers = [use for use in value.uses() if use.node not in moves and not _widens(use.node)]
            if readers:
                cast = _cast(value, FLOAT, fresh)
                graph.insert_before(others[0], cast)
                for use in readers:
                    use.node.replace_input_with(use.idx, cast.outputs[0])
        for node, output in narrow:
            _emulate(graph, node, output, fresh)
        return bool(narrow or weights)


def _moves_of_weights(graph: ir.Graph) -> dict[ir.Node, None]:
    """Return the leading nodes of ``graph`` that put its bf16 initializers together
    (:mod:`converter.fuse.fuse`)."""
    moves, known = dict[ir.Node, None](), set[ir.Value | None](graph.initializers.values())
    for node in graph:
        if node.op_type not in PUT_TOGETHER or node.outputs[0].dtype != BFLOAT16 or not known.issuperset(node.inputs):
            break
        moves[node] = None
        known.update(node.outputs)
    return moves


def _emulate(graph: ir.Graph, node: ir.Node, output: ir.Value, fresh: FreshNames) -> None:
    """Make every node that reads ``output`` read its rounded fp32 value instead."""
    readers, last = tuple(output.uses()), node
    if node.op_type != "Cast":
        output.type = ir.TensorType(FLOAT)
        if node.op_type in EXACT:
            return
        last = _cast(output, BFLOAT16, fresh)
        graph.insert_after(node, last)
        output = last.outputs[0]
    back = _cast(output, FLOAT, fresh)
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
