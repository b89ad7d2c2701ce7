"""Stores equal weights once: exporters write tied embeddings twice, often one as the transpose of the other."""

from __future__ import annotations

from collections import defaultdict

import onnx_ir as ir

from converter.graph.equality import Array, Fingerprint, fingerprint, same_bits
from converter.graph.names import FreshNames, all_value_names
from converter.graph.step import Step

# By fingerprint. Tensors, not arrays: tensors computed on reading would otherwise all be in memory at once.
_Kept = dict[Fingerprint, list[tuple[ir.Value, ir.TensorProtocol]]]
SMALLEST_BYTES = 1024  # sharing all-zero biases saves nothing, and they would lose their names


class ShareEqualWeights(Step):
    """Merge equal initializers; replace one that is another's transpose by a Transpose of the other.

    Only fp32 and int64 initializers (tables of indices) with two or more dimensions and at least 1 KiB are compared.
    Transposing is exact, and ONNX Runtime does it once at load. Requires: initializers are in the main graph.
    """

    name = "share equal weights"

    def apply(self, model: ir.Model) -> bool:
        graph, fresh = model.graph, FreshNames(all_value_names(model))
        kept: _Kept = defaultdict(list)
        transposed: dict[ir.Value, ir.Value] = {}
        before = len(graph.initializers)
        for value, tensor in _weights(graph):
            array = tensor.numpy()
            twin = _find(kept, array)
            mirrored = _find(kept, array.T) if twin is None and array.ndim == 2 else None
            if mirrored is not None:
                if mirrored not in transposed:
                    transposed[mirrored] = _transpose(graph, mirrored, fresh)
                twin = transposed[mirrored]
            if twin is None:
                kept[fingerprint(array)].append((value, tensor))
            else:
                value.replace_all_uses_with(twin)
                graph.initializers.pop(value.name or "")
        return len(graph.initializers) != before


def _weights(graph: ir.Graph) -> list[tuple[ir.Value, ir.TensorProtocol]]:
    """Return the weights, tables first: rows are looked up as stored, and a product is as fast by a Transpose."""
    found = [
        (value, tensor)
        for value in graph.initializers.values()
        if (tensor := value.const_value) is not None
        and tensor.dtype in (ir.DataType.FLOAT, ir.DataType.INT64)
        and len(tensor.shape) >= 2
        and tensor.nbytes >= SMALLEST_BYTES
    ]
    return sorted(found, key=lambda pair: not _looked_up(pair[0]))


def _looked_up(value: ir.Value) -> bool:
    return any(node.op_type == "Gather" and position == 0 for node, position in value.uses())


def _find(kept: _Kept, array: Array) -> ir.Value | None:
    found = (value for value, candidate in kept.get(fingerprint(array), ()) if same_bits(candidate.numpy(), array))
    return next(found, None)


def _transpose(graph: ir.Graph, value: ir.Value, fresh: FreshNames) -> ir.Value:
    name = f"{value.name}/transposed"
    node = ir.node("Transpose", [value], attributes={"perm": [1, 0]}, name=fresh.make(name))
    output = node.outputs[0]
    output.name, output.type = fresh.make(name), value.type
    output.shape = ir.Shape(tuple(reversed(value.shape or ())))
    graph.insert_before(graph[0], node)  # a node reads each of the two weights, so there is a first
    return output
