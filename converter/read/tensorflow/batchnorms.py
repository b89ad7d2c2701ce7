"""Turns BatchNorm as Keras 3 writes it, a product and a sum per channel, back into one operator.

The converter folds that operator into the convolution before it, and can undo this when weights are restored. With a
mean of 0, a variance of 1 and no epsilon it computes exactly what the two operators did.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from converter.graph.names import FreshNames, all_value_names

if TYPE_CHECKING:
    import onnx_ir as ir

    from converter.source import Array

_RANK = 4


def restore_batchnorms(model: ir.Model) -> int:
    """Rewrite each fp32 Conv, Mul by [1, C, 1, 1], Add of [1, C, 1, 1] in the main graph as Conv, BatchNormalization.

    Returns how many were rewritten.
    """
    from converter.graph.initializers import const_dims

    added = _AddedInitializers(model.graph, FreshNames(all_value_names(model)))
    count = 0
    for node in list(model.graph):
        scaled = _only_reader(node, "Mul") if node.op_type == "Conv" and node.domain == "" else None
        shifted = _only_reader(scaled, "Add") if scaled is not None else None
        if scaled is None or shifted is None:
            continue
        scale, shift = _channels(scaled, node.outputs[0]), _channels(shifted, scaled.outputs[0])
        kernel = const_dims(node.inputs[1])
        if scale is not None and shift is not None and scale.shape == shift.shape == kernel[:1]:
            _replace(added, (node, scaled, shifted), (scale, shift))
            count += 1
    return count


def _only_reader(node: ir.Node, op_type: str) -> ir.Node | None:
    """Return the only reader of the output of ``node`` if it is an ``op_type``."""
    (value, *others), readers = node.outputs, [use.node for use in node.outputs[0].uses()]
    if others or value.is_graph_output() or len(readers) != 1:
        return None
    reader = readers[0]
    return reader if reader.op_type == op_type and reader.domain == "" and reader.graph is node.graph else None


def _channels(node: ir.Node, given: ir.Value) -> Array | None:
    """Return the constant beside ``given`` if it is one fp32 number per channel."""
    from converter.graph.initializers import const, dims

    tensor = const(next((value for value in node.inputs if value is not given), None))
    if tensor is None or tensor.dtype.name != "FLOAT" or len(dims(tensor)) != _RANK:
        return None
    first, channels, height, width = dims(tensor)
    return tensor.numpy().reshape(channels) if (first, height, width) == (1, 1, 1) else None


@dataclass
class _AddedInitializers:
    """The initializers that were added to ``graph``; a mean and a variance are shared by number of channels."""

    graph: ir.Graph
    fresh: FreshNames
    constants: dict[tuple[str, int], ir.Value] = field(default_factory=dict)

    def constant(self, part: str, array: Array) -> ir.Value:
        """Return the initializer of ``array``; there is one for each part and size."""
        key = part, array.size
        if key not in self.constants:
            self.constants[key] = self.initializer(f"batchnorm_{part}_{array.size}", array)
        return self.constants[key]

    def initializer(self, name: str, array: Array) -> ir.Value:
        import onnx_ir as ir

        from converter.graph.initializers import initializer

        own = self.fresh.make(name)
        return initializer(self.graph, own, ir.tensor(array, name=own))


def _replace(added: _AddedInitializers, nodes: tuple[ir.Node, ir.Node, ir.Node], affine: tuple[Array, Array]) -> None:
    import numpy as np
    import onnx_ir as ir

    convolution, scaled, shifted = nodes
    name = shifted.name or "batch_normalization"
    scale, shift = affine
    values = [
        added.initializer(f"{name}.scale", scale),
        added.initializer(f"{name}.shift", shift),
        added.constant("mean", np.zeros_like(scale)),
        added.constant("variance", np.ones_like(scale)),
    ]
    output, old_inputs = shifted.outputs[0], [*scaled.inputs, *shifted.inputs]
    node = ir.node("BatchNormalization", [convolution.outputs[0], *values], {"epsilon": 0.0}, name=name)
    node.outputs[0].shape, node.outputs[0].type = output.shape, output.type
    added.graph.insert_after(shifted, node)
    ir.convenience.replace_all_uses_with(output, node.outputs[0], replace_graph_outputs=True)
    name_of_output, output.name = output.name, None
    node.outputs[0].name = name_of_output
    added.graph.remove((shifted, scaled), safe=True)
    for value in old_inputs:  # otherwise the artifact would contain both forms
        if value is not None and not value.uses() and value.is_initializer():
            added.graph.initializers.pop(value.name or "", None)
