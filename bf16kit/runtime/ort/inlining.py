"""Limits what ONNX Runtime makes of an ONNX graph's functions: it inlines all calls before it does anything else.

Functions that call each other a few times at each of a few levels make a graph of any size out of a file of 3 kB.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

from bf16kit.messages.errors import RuntimeFailure
from bf16kit.runtime.ort.kernel import all_nodes, parse_graph

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

# Nodes of the graph with all calls inlined. Large models have some 50,000; ONNX Runtime takes a minute for this many.
MOST_NODES = 500_000
_Key = tuple[str, str, str]


def check_inlined_size(path: Path, parsed: ModelProto | None = None) -> None:
    """Raise :class:`RuntimeFailure` if the graph in ``path`` has too many nodes once its functions are inlined.

    ``parsed`` is the file's content. A file that cannot be parsed passes: ONNX Runtime reports that better.
    """
    model = parse_graph(parsed or path)
    if not model.functions:
        return
    bodies: dict[_Key, Counter[_Key]] = {
        (_domain(each.domain), each.name, each.overload): _operators(each.node) for each in model.functions
    }
    calls = {key: body.keys() & bodies.keys() for key, body in bodies.items()}
    try:
        order = tuple(TopologicalSorter(calls).static_order())
    except CycleError as error:
        raise RuntimeFailure(f"{path.name}: its function {error.args[1][0][1]!r} calls itself") from None
    sizes: dict[_Key, int] = {}
    for key in order:
        sizes[key] = _size(bodies[key], sizes)
    if _size(_operators(model.graph.node), sizes) > MOST_NODES:
        raise RuntimeFailure(f"{path.name} has more than {MOST_NODES} nodes once its functions are inlined")


def _size(operators: Counter[_Key], sizes: dict[_Key, int]) -> int:
    """Return the number of nodes, cut off above the limit: the exact number may have thousands of digits."""
    return min(sum(count * sizes.get(key, 1) for key, count in operators.items()), MOST_NODES + 1)


def _operators(nodes: Iterable[NodeProto]) -> Counter[_Key]:
    return Counter((_domain(node.domain), node.op_type, node.overload) for node in all_nodes(nodes))


def _domain(name: str) -> str:
    return "" if name == "ai.onnx" else name
