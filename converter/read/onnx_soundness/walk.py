"""Iterates over the graphs and nodes of an ONNX file, and looks up operator schemas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto
from onnx.defs import OpSchema

Opsets = Mapping[str, int]  # the version of each domain

_NEWEST = onnx.defs.onnx_opset_version()  # in a newer opset an operator may accept more than this schema says
_SHOWN = 60  # characters of a name, which may be hostile


def graphs(model: ModelProto) -> Iterator[GraphProto]:
    """Yield the main graph, and every subgraph in it and in functions."""
    yield from _with_bodies([model.graph])
    for function in model.functions:
        yield from _with_bodies([graph for node in function.node for graph in bodies(node)])


def bodies(node: NodeProto) -> Iterator[GraphProto]:
    """Yield the graphs that ``node`` has as attributes."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def nodes(model: ModelProto) -> Iterator[tuple[NodeProto, Opsets]]:
    """Yield every node, including those of subgraphs and functions, with the opsets that apply to it."""
    opsets = _versions(model.opset_import)
    for graph in _with_bodies([model.graph]):
        yield from ((node, opsets) for node in graph.node)
    for function in model.functions:
        own = {**opsets, **_versions(function.opset_import)}
        yield from ((node, own) for node in function.node)
        for graph in _with_bodies([graph for node in function.node for graph in bodies(node)]):
            yield from ((node, own) for node in graph.node)


class Schemas:
    """ONNX's schemas for the operators of one model."""

    def __init__(self, model: ModelProto) -> None:
        self._functions = {(_domain(function.domain), function.name) for function in model.functions}

    def of(self, node: NodeProto, opsets: Opsets) -> OpSchema | None:
        """Return the schema of ``node``; None if the operator is not ONNX's, or its opset lacks it or is too new."""
        domain = _domain(node.domain)
        if (domain, node.op_type) in self._functions or (not domain and opsets.get("", 0) > _NEWEST):
            return None
        try:
            schema = onnx.defs.get_schema(node.op_type, opsets.get(domain, 0), domain)
        except (onnx.defs.SchemaError, TypeError):  # not ONNX's; or an opset beyond 32 bits
            return None
        return None if schema.deprecated else schema


def quoted(name: str) -> str:
    """Return ``name`` for a message, cut, because a hostile file chooses its length."""
    return repr(name if len(name) <= _SHOWN else f"{name[:_SHOWN]}…")


def _with_bodies(todo: list[GraphProto]) -> Iterator[GraphProto]:
    while todo:
        graph = todo.pop()
        yield graph
        todo += [body for node in graph.node for body in bodies(node)]


def _versions(imports: Iterable[OperatorSetIdProto]) -> dict[str, int]:
    return {_domain(entry.domain): entry.version for entry in imports}


def _domain(name: str) -> str:
    return "" if name == "ai.onnx" else name
