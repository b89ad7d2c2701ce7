"""Moves initializers inside If, Loop and Scan bodies to the main graph: only there can they be fed from memory."""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir

from bf16kit.messages.errors import ConversionError
from converter.graph.names import FreshNames, values_of
from converter.graph.step import Step


class HoistInitializers(Step):
    """Move every initializer of a body to the main graph; insert an Identity where one is a graph output.

    Both branches of an If often call their weight ``weight``, so a name that occurs twice is made unique. ONNX
    Runtime's ``add_external_initializers``, which feeds the reference, knows only initializers of the main graph.
    Requires: constants are initializers. Ensures: bodies hold no initializers; no initializer is an output.
    """

    name = "hoist initializers out of bodies"

    def apply(self, model: ir.Model) -> bool:
        uses = Counter(v.name for graph in model.graphs() for v in values_of(graph) if v.name)
        fresh = FreshNames(uses)
        count = 0
        for graph in model.graphs():
            for name, value in tuple(graph.initializers.items()):
                if value.is_graph_output():
                    _separate_from_output(graph, value, fresh)
                if graph is not model.graph:
                    graph.initializers.pop(value.name or name)
                    if value.name == name and uses[name] > 1:
                        value.name = fresh.make(name)
                    model.graph.register_initializer(value)
                    count += 1
        return bool(count)

    def ensures(self, model: ir.Model) -> None:
        for graph in model.graphs():
            if graph is not model.graph and graph.initializers:
                raise ConversionError(f"body {graph.name!r} still holds {next(iter(graph.initializers))!r}")


def _separate_from_output(graph: ir.Graph, value: ir.Value, fresh: FreshNames) -> None:
    """Make an Identity produce the output under its own name; the initializer takes a new name."""
    name = value.name or "output"
    identity = ir.node("Identity", [value], name=fresh.make(f"{name}/identity"))
    output = identity.outputs[0]
    output.type, output.shape = value.type, value.shape
    for index, existing in enumerate(graph.outputs):
        if existing is value:
            graph.outputs[index] = output
    graph.append(identity)
    value.name = fresh.make(f"{name}.value")
    output.name = name
