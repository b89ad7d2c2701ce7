"""Nodes that put panels back into a matrix: :func:`bf16kit.numerics.panels.unpack` in ONNX's own operators."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx_ir as ir

from bf16kit.numerics.panels import WIDTH


def panel_shapes(k: int, n: int) -> dict[str, list[int]]:
    """Return the int64 lists that :func:`matrix_nodes` reads for a matrix of [k, n], by name.

    The names tell which of three forms the nodes have: only whole panels, whole panels and a narrower last one, or only
    a narrower one, which is the matrix itself.
    """
    panels, rest = divmod(n, WIDTH)
    if not panels:
        return {"matrix": [k, n]}
    if not rest:
        return {"panels": [panels, k, WIDTH], "matrix": [k, n]}
    whole = n - rest
    return {"parts": [k * whole, k * rest], "panels": [panels, k, WIDTH], "whole": [k, whole], "tail": [k, rest]}


def panel_form(lists: Collection[str]) -> str:
    """Return which of the three forms :func:`panel_shapes` describes, as in the names of the kernel's operators."""
    if "panels" not in lists:
        return "panels_narrow"
    return "panels_tail" if "tail" in lists else "panels"


def matrix_nodes(weight: ir.Value, lists: Mapping[str, ir.Value]) -> list[ir.Node]:
    """Return nodes, without names, that turn ``weight``, k·n elements in panels, into its matrix [k, n].

    The last node's output is the matrix. ``lists`` holds :func:`panel_shapes` as values. Requires: opset 13 or newer,
    where Split takes the sizes of its parts as an input.
    """
    if "panels" not in lists:
        return [ir.node("Reshape", [weight, lists["matrix"]])]
    if "parts" not in lists:
        return _whole(weight, lists["panels"], lists["matrix"])
    split = ir.node("Split", [weight, lists["parts"]], attributes={"axis": 0}, num_outputs=2)
    whole = _whole(split.outputs[0], lists["panels"], lists["whole"])
    tail = ir.node("Reshape", [split.outputs[1], lists["tail"]])
    joined = ir.node("Concat", [whole[-1].outputs[0], tail.outputs[0]], attributes={"axis": 1})
    return [split, *whole, tail, joined]


def _whole(weight: ir.Value, panels: ir.Value, matrix: ir.Value) -> list[ir.Node]:
    """Return the nodes for [P, k, 32] → [k, P, 32] → [k, 32·P]."""
    reshaped = ir.node("Reshape", [weight, panels])
    transposed = ir.node("Transpose", [reshaped.outputs[0]], attributes={"perm": [1, 0, 2]})
    return [reshaped, transposed, ir.node("Reshape", [transposed.outputs[0], matrix])]
