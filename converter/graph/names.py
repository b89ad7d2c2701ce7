"""Names of a graph's values: unused ones, all that are taken, and a value that takes another's place and name."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir


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
