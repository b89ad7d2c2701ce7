"""Gives every node and value a name, the same on every run: the plan, the report and ``--keep-fp32`` use the names."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from bf16kit.messages.errors import ConversionError
from converter.graph.step import Step


class NameEverything(Step):
    """Name unnamed nodes and values; make node names unique over the whole model, value names over each graph.

    Names that are already unique do not change. Requires: every value that a node reads has a producer. Ensures: every
    node and every used value has a name.
    """

    name = "name nodes and values"

    def requires(self, model: ir.Model) -> None:
        for node in model.graph.all_nodes():
            for value in node.inputs:
                if value is not None and not (value.producer() or value.is_graph_input() or value.is_initializer()):
                    raise ConversionError(
                        f"node {node.name or node.op_type!r} reads {value.name!r}, which no node, input or"
                        " initializer gives; if it is a sparse initializer, make it dense"
                    )

    def apply(self, model: ir.Model) -> bool:
        nodes = FreshNames(node.name for node in model.graph.all_nodes() if node.name)
        values = FreshNames(all_value_names(model))
        seen: set[str] = set()
        modified = False
        for position, node in enumerate(model.graph.all_nodes()):
            if not node.name or node.name in seen:
                node.name = nodes.make(node.name or f"{node.op_type}_{position}")
                modified = True
            seen.add(node.name)
            for index, output in enumerate(node.outputs):
                if output.name is None and output.uses():
                    output.name = values.make(f"{node.name}:{index}")
                    modified = True
        return modified


class FreshNames:
    """Makes unused names: ``make("a")`` returns ``a``, then ``a_1``, ``a_2`` …"""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken)

    def make(self, name: str) -> str:
        candidate, count = name, 0
        while candidate in self._taken:
            count += 1
            candidate = f"{name}_{count}"
        self._taken.add(candidate)
        return candidate


def values_of(graph: ir.Graph) -> list[ir.Value]:
    """Return the values a graph defines itself: inputs, initializers, node outputs; not those of its subgraphs."""
    inputs = [value for value in graph.inputs if not value.is_initializer()]
    return [*inputs, *graph.initializers.values(), *(o for node in graph for o in node.outputs)]


def all_value_names(model: ir.Model) -> set[str]:
    """Return the names of every value of the main graph and of every subgraph."""
    return {value.name for graph in model.graphs() for value in values_of(graph) if value.name}


def replace_output(node: ir.Node, replacement: ir.Value | None) -> None:
    """Make ``replacement`` take the place of ``node``'s first output, under its name, and remove the node."""
    output, graph = node.outputs[0], node.graph
    if replacement is None or graph is None:
        return
    name = output.name
    output.replace_all_uses_with(replacement, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    output.name = None
    replacement.name = name
