"""Joins the three convolutions of an inverted bottleneck of a mobile network into one node of the CPU kernel.

A product widens the pixels, each channel is convolved by itself, and another product narrows the pixels. The wide
images between them never leave the second-level cache (docs/decisions/0091-bottlenecks.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from bf16kit.converter.fuse.functions import Fusing, define, rounds_activations
from bf16kit.converter.graph.initializers import only_reader
from bf16kit.runtime.ort.kernel import DOMAIN


def join_bottlenecks(fusing: Fusing) -> None:
    """Replace each bottleneck of the kernel's convolutions by one node, which takes the name of the last."""
    for last in tuple(fusing.graph):
        fusing.anchor = last.name or ""
        depthwise = _before(last)
        first = None if depthwise is None else _before(depthwise)
        if first is not None and depthwise is not None and _is_bottleneck(first, depthwise, last):
            _join(fusing, first, depthwise, last)


def _before(node: ir.Node) -> ir.Node | None:
    """Return the kernel's convolution whose image only the convolution ``node`` of the kernel reads."""
    if not _convolves(node) or node.inputs[0] is None:
        return None
    inward = node.inputs[0].producer()
    outward = None if inward is None or inward.inputs[0] is None else inward.inputs[0].producer()
    made = None if outward is None or outward.inputs[0] is None else outward.inputs[0].producer()
    if inward is None or outward is None or made is None or not _convolves(made) or outward.op_type != "Transpose":
        return None
    alone = only_reader(made.outputs[0]) is outward and only_reader(outward.outputs[0]) is inward
    return made if alone and len(inward.outputs[0].uses()) == 1 else None


def _convolves(node: ir.Node) -> bool:
    return node.domain == DOMAIN and node.op_type.startswith("Conv")


def _activated(node: ir.Node) -> str:
    word = node.op_type.rpartition("_")[2]
    return word if word in ("relu", "silu", "relu6") else ""


def _is_bottleneck(first: ir.Node, depthwise: ir.Node, last: ir.Node) -> bool:
    if not depthwise.op_type.startswith("ConvDepthwise") or _activated(last):
        return False
    dense = all(not node.op_type.startswith("ConvDepthwise") and _of_pixels(node) for node in (first, last))
    alike = rounds_activations(first.op_type) == rounds_activations(last.op_type)
    return dense and alike and _activated(first) == _activated(depthwise)


def _of_pixels(node: ir.Node) -> bool:
    given = node.attributes
    ones = {*given.get_ints("kernel_shape", []), *given.get_ints("strides", [])}
    return ones == {1} and not any(given.get_ints("pads", []))


def _join(fusing: Fusing, first: ir.Node, depthwise: ir.Node, last: ir.Node) -> None:
    nodes = first, depthwise, last
    attributes: dict[str, Any] = {
        f"{name}{place}": value.value for place, node in enumerate(nodes, 1) for name, value in node.attributes.items()
    }
    inputs = [first.inputs[0], *(node.inputs[place] for place in (1, 2) for node in nodes)]
    function = _function(nodes, attributes, fusing.opset)
    made = fusing.operator(function, inputs, attributes, last, last.name)
    fusing.replace("convolution", last, [last], made, {last.outputs[0]: made.outputs[0]})


def _function(nodes: tuple[ir.Node, ...], attributes: Mapping[str, Any], opset: int) -> ir.Function:
    """Return the function: X [batch, …, channels], three weights and biases → Y [batch, …, n]; it calls the three."""
    forms = [node.op_type.partition("_")[2].removesuffix(_activated(node)).strip("_") for node in (nodes[0], nodes[2])]
    stem = f"ConvBlock{'Bf16' if rounds_activations(nodes[0].op_type) else ''}"
    body = ""
    for place, node in enumerate(nodes, 1):
        kinds = {
            name: "ints" if isinstance(each.value, tuple | list) else "int" for name, each in node.attributes.items()
        }
        given = ", ".join(f"{name}: {kind} = @{name}{place}" for name, kind in kinds.items())
        x, y = "X" if place == 1 else f"I{place - 1}", "Y" if place == len(nodes) else f"I{place}"
        body += f"{y} = {DOMAIN}.{node.op_type} <{given}> ({x}, W{place}, B{place}) "
    op_type = "_".join([stem, *forms, *([_activated(nodes[0])] if _activated(nodes[0]) else [])])
    inputs = ["X", *(f"{name}{place}" for name in "WB" for place in (1, 2, 3))]
    return define(op_type, inputs, ["Y"], attributes, opset, body)
