"""BatchNorm as Keras 3 writes it, a product and a sum for each channel, as the one operator that it was.

The converter folds that operator into the convolution before it, and knows how to undo this when weights are restored.
With a mean of 0, a variance of 1 and no epsilon it computes what the two did, bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from converter.graph.names import FreshNames, all_value_names

if TYPE_CHECKING:
    import onnx_ir as ir

    from converter.model import Array

_RANK = 4


def gather(model: ir.Model) -> int:
    """Rewrite each Conv, Mul by [1, C, 1, 1], Add of [1, C, 1, 1] of fp32 in the main graph; returns how many."""
    from converter.graph.initializers import const_dims

    fresh, count = FreshNames(all_value_names(model)), 0
    for node in list(model.graph):
        scaled = _only_reader(node, "Mul") if node.op_type == "Conv" and node.domain == "" else None
        shifted = _only_reader(scaled, "Add") if scaled is not None else None
        if scaled is None or shifted is None:
            continue
        scale, shift = _channels(scaled, node.outputs[0]), _channels(shifted, scaled.outputs[0])
        kernel = const_dims(node.inputs[1])
        if scale is not None and shift is not None and scale.shape == shift.shape == kernel[:1]:
            _replace(model.graph, (node, scaled, shifted), (scale, shift), fresh)
            count += 1
    return count


def _only_reader(node: ir.Node, op_type: str) -> ir.Node | None:
    """What alone reads the output of ``node``, if that is an ``op_type``."""
    (value, *others), readers = node.outputs, [use.node for use in node.outputs[0].uses()]
    if others or value.is_graph_output() or len(readers) != 1:
        return None
    reader = readers[0]
    return reader if reader.op_type == op_type and reader.domain == "" and reader.graph is node.graph else None


def _channels(node: ir.Node, given: ir.Value) -> Array | None:
    """The constant beside ``given``, if it is one fp32 number for each channel."""
    from converter.graph.initializers import const, dims

    tensor = const(next((value for value in node.inputs if value is not given), None))
    if tensor is None or tensor.dtype.name != "FLOAT" or len(dims(tensor)) != _RANK:
        return None
    first, channels, height, width = dims(tensor)
    return tensor.numpy().reshape(channels) if (first, height, width) == (1, 1, 1) else None


def _replace(
    graph: ir.Graph, nodes: tuple[ir.Node, ir.Node, ir.Node], affine: tuple[Array, Array], fresh: FreshNames
) -> None:
    import numpy as np
    import onnx_ir as ir

    from converter.graph.initializers import initializer

    convolution, scaled, shifted = nodes
    name = shifted.name or "batch_normalization"
    scale, shift = affine
    parts = {"scale": scale, "shift": shift, "mean": np.zeros_like(scale), "variance": np.ones_like(scale)}
    values = []
    for part, array in parts.items():
        own = fresh.make(f"{name}.{part}")
        values.append(initializer(graph, own, ir.tensor(array, name=own)))
    output = shifted.outputs[0]
    made = ir.node("BatchNormalization", [convolution.outputs[0], *values], {"epsilon": 0.0}, name=name)
    made.outputs[0].shape, made.outputs[0].type = output.shape, output.type
    graph.insert_after(shifted, made)
    ir.convenience.replace_all_uses_with(output, made.outputs[0], replace_graph_outputs=True)
    kept, output.name = output.name, None
    made.outputs[0].name = kept
    graph.remove((shifted, scaled), safe=True)
