"""Checks which values a program may write into: only those that it made itself, in memory of their own.

A program that writes into an input, a weight, or a view of one changes its next run's result, or its caller's data. So
the check follows through the program whether a value shares memory with another. The result of an operator that is not
known to return fresh memory (:data:`bf16kit.runtime.exported.operators.FRESH`) counts as sharing memory with its
arguments.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from bf16kit.messages.errors import RuntimeFailure
from bf16kit.runtime.exported import operators
from bf16kit.runtime.exported.steps import assigned_names, referenced_names
from bf16kit.runtime.exported.values import Ref

if TYPE_CHECKING:
    from bf16kit.runtime.exported.graph import Graph, Node

_RETURNS_OWN_MEMORY = operators.FRESH | operators.IN_PLACE
_ATEN = "torch.ops.aten."
_MEAN, _VARIANCE, _TRAINING = 3, 4, 5  # positions of a batch norm's arguments


def check_writes(graph: Graph) -> None:
    """Raise :class:`RuntimeFailure` if ``graph`` may write into an input, a weight or a part of one."""
    _owned_values(graph, frozenset())


def _owned_values(graph: Graph, own: Iterable[str]) -> set[str]:
    """Return the values of ``graph`` whose memory the program allocated; ``own`` are those among its inputs.

    A name may be assigned twice, as at run time: the last assignment counts.
    """
    found = set(own)
    for node in graph.nodes:
        _check(node, found)
        for name, is_own in _output_ownership(node, found):
            (found.add if is_own else found.discard)(name)
    return found


def _output_ownership(node: Node, own: set[str]) -> list[tuple[str, bool]]:
    """Return the names of the outputs of ``node``, each with whether its memory is the program's own."""
    position = next((i for i, value in enumerate(node.args) if hasattr(value, "nodes")), None)
    if position is None:
        # _check has already shown that what is written in place is the program's own.
        fresh = _name(node) in _RETURNS_OWN_MEMORY or not node.target.startswith(_ATEN)
        is_own = fresh or referenced_names((*node.args, *node.kwargs.values())) <= own
        return [(name, is_own) for name in assigned_names(node.outputs) if name]
    graph = node.args[position]
    given = zip(graph.inputs, node.args[position + 1 :], strict=False)
    owned_inside = _owned_values(graph, (name for name, value in given if referenced_names([value]) <= own))
    results = [referenced_names([result]) <= owned_inside for result in graph.results]
    if len(results) != len(node.outputs):
        results = [all(results)] * len(node.outputs)
    pairs = zip(node.outputs, results, strict=True)
    return [(name, is_own) for output, is_own in pairs for name in assigned_names([output]) if name]


def _name(node: Node) -> str:
    return node.target.removeprefix(_ATEN).partition(".")[0]


def _check(node: Node, own: set[str]) -> None:
    name = _name(node)
    if name in operators.IN_PLACE:
        written = node.kwargs.get("self", node.args[0] if node.args else None)
        if not isinstance(written, Ref) or written.name not in own:
            target = written.name if isinstance(written, Ref) else written
            raise RuntimeFailure(
                f"operator {node.target!r} writes into {target!r}, which may share memory with an input or"
                " weight; write into a clone() of it, or save ep.run_decompositions(), which writes nothing in place"
            )
    elif name in operators.RUNNING and not node.target.endswith(".no_stats"):
        stats = [_argument(node, _MEAN, "running_mean"), _argument(node, _VARIANCE, "running_var")]
        training = _argument(node, _TRAINING, operators.RUNNING[name])
        if training is not False and not referenced_names(stats) <= own:
            raise RuntimeFailure(
                f"operator {node.target!r} writes into its running statistics; export the module in evaluation mode"
            )


def _argument(node: Node, position: int, name: str) -> Any:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)
