"""The cost of an island: the arithmetic of nodes, counted from shapes, and the bytes of weights that bf16 loses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from converter.graph.initializers import const, dims

Shape = tuple[int, ...]

_PRODUCTS_DOMAINS = ("", "com.microsoft")  # FusedMatMul is in the second
_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


@dataclass(frozen=True, slots=True)
class Costs:
    """Floating-point operations by node of the main graph, for one sample feed, and fp32 bytes by stored tensor."""

    flops: Mapping[str, int]
    bytes: Mapping[str, int]

    @classmethod
    def of(cls, model: ir.Model, weights: frozenset[str], shapes: Mapping[str, Shape]) -> Costs:
        """Count the costs; ``shapes`` are those of each node's first fp32 output when one sample was run."""
        sizes = {
            name: value.const_value.nbytes
            for name, value in model.graph.initializers.items()
            if name in weights and value.const_value is not None
        }
        return cls({node.name or "": flops(node, shapes) for node in model.graph}, sizes)

    def flops_share(self, nodes: frozenset[str]) -> float:
        """Return the share of all arithmetic that ``nodes`` do."""
        return _share(self.flops, nodes)

    def bytes_share(self, tensors: frozenset[str]) -> float:
        """Return the share of all weights' bytes that ``tensors`` hold."""
        return _share(self.bytes, tensors)


def flops(node: ir.Node, shapes: Mapping[str, Shape]) -> int:
    """Count two per multiply-add of a product, and one per element of any other node that computes floats."""
    shape = shapes.get(node.name or "")
    if shape is None:
        return 0
    return math.prod(shape) * _per_element(node, shapes)


def _per_element(node: ir.Node, shapes: Mapping[str, Shape]) -> int:
    if node.domain not in _PRODUCTS_DOMAINS:  # operators of other domains may have the same names, but other inputs
        return 1
    if node.op_type in ("MatMul", "Gemm", "FusedMatMul"):
        left = _shape(node.inputs[0], shapes)
        transposed = "transA" in node.attributes and node.attributes["transA"].as_int() == 1
        return 2 * (left[0 if transposed else -1] if left else 1)
    if node.op_type == "Conv":
        return 2 * math.prod(_shape(node.inputs[1], shapes)[1:])
    if node.op_type == "ConvTranspose":
        return 2 * math.prod(_shape(node.inputs[1], shapes)[2:]) * _shape(node.inputs[1], shapes)[0]
    if node.op_type in _GATES:
        widths = [_shape(value, shapes)[-1:] for value in node.inputs[1:3]]
        return 2 * _GATES[node.op_type] * sum(width[0] for width in widths if width)
    return 1


def _shape(value: ir.Value | None, shapes: Mapping[str, Shape]) -> Shape:
    """Return the shape as far as it is known, with 1 for each unknown dimension."""
    if value is None:
        return ()
    tensor, producer = const(value), value.producer()
    if tensor is not None:
        return dims(tensor)
    if producer is not None and producer.outputs[0] is value and (producer.name or "") in shapes:
        return shapes[producer.name or ""]
    return () if value.shape is None else tuple(d if isinstance(d, int) else 1 for d in value.shape)


def _share(amounts: Mapping[str, int], names: frozenset[str]) -> float:
    total = sum(amounts.values())
    return sum(amounts.get(name, 0) for name in names) / total if total else 0.0
