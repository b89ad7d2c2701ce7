"""Finds what TensorFlow would run to compute some of a graph's tensors: nodes, and the functions that these call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def reachable_nodes(graph: Any, roots: Iterable[str]) -> Iterator[tuple[Any, str]]:
    """Yield each node that ``roots`` (names of tensors or nodes) need, with its function ("" for the graph).

    A called function counts as a whole. Unknown names are left to TensorFlow, which rejects them.
    """
    functions = {function.signature.name: function for function in graph.library.function}
    called: list[str] = []
    for node in _dependencies(graph, roots):
        yield node, ""
        called += _calls(node, functions)
    seen: set[str] = set()
    while called:
        name = called.pop()
        if name in seen:
            continue
        seen.add(name)
        for node in functions[name].node:
            yield node, name
            called += _calls(node, functions)


def node_of(tensor: str) -> str:
    """Return the node of ``name:0``, ``^name`` or ``name``."""
    return tensor.removeprefix("^").partition(":")[0]


def _dependencies(graph: Any, roots: Iterable[str]) -> Iterator[Any]:
    nodes: dict[str, list[Any]] = {}
    for node in graph.node:  # a duplicate name, which TensorFlow rejects, must not hide a node here
        nodes.setdefault(node.name, []).append(node)
    waiting, seen = [node_of(root) for root in roots], set[str]()
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            for node in nodes.get(name, ()):
                yield node
                waiting += map(node_of, node.input)


def _calls(node: Any, functions: dict[str, Any]) -> Iterator[str]:
    """Yield the functions that ``node`` may call: by an attribute, at any depth, or by its own operator name."""
    if node.op in functions:
        yield node.op
    waiting = [entry.value for entry in node.attr]
    while waiting:
        value = waiting.pop()
        for call in (value.func, *value.list.func):
            if call.name in functions:
                yield call.name
            waiting += [entry.value for entry in call.attr]
