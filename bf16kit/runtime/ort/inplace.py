"""Finds the weights of an fp32 graph that ONNX Runtime can read in place, so that several sessions share one copy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from bf16kit.numerics.tensors import BY_NAME

if TYPE_CHECKING:
    from onnx import GraphProto

#: The inputs, by operator and position, that the operator's kernel reads in place, without copying them.
#: Conv is not among them: ONNX Runtime rearranges its weights when it opens a session.
_READ_IN_PLACE = {("MatMul", 1), ("Gemm", 1), ("Gather", 0)}
_OTHER_USE = ("", -1)


def read_in_place(path: Path) -> frozenset[str]:
    """Return the fp32 initializers of the graph in ``path`` that are read only as :data:`_READ_IN_PLACE` allows."""
    import onnx

    model = onnx.load(path, format="protobuf", load_external_data=False)
    uses = defaultdict[str, set[tuple[str, int]]](set)
    for name, operator, position in _uses(model.graph, main=True):
        uses[name].add((operator, position))
    fp32 = [tensor.name for tensor in model.graph.initializer if tensor.data_type == BY_NAME["float32"].onnx]
    return frozenset(name for name in fp32 if uses[name] and uses[name] <= _READ_IN_PLACE)


def _uses(graph: GraphProto, *, main: bool) -> Iterator[tuple[str, str, int]]:
    """Yield each name that ``graph`` reads, with operator and input position.

    Reads in subgraphs or by other domains, and graph outputs, are yielded as :data:`_OTHER_USE`.
    """
    for output in graph.output:
        yield output.name, *_OTHER_USE
    for node in graph.node:
        known = main and node.domain in ("", "ai.onnx")
        for position, name in enumerate(node.input):
            yield (name, node.op_type, position) if known else (name, *_OTHER_USE)
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _uses(inner, main=False)
