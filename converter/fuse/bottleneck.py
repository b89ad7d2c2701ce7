"""Joins the three convolutions of an inverted bottleneck of a mobile network into one node of the CPU kernel.

A product widens the pixels, each channel is convolved by itself, and another product narrows the pixels. The wide
images between them never leave the second-level cache (docs/decisions/0091-bottlenecks.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import onnx_ir as ir

from bf16kit.converter.fuse.activations import activation
from bf16kit.converter.fuse.convolve import ACTIVATIONS, Convolution, zeros_added
from bf16kit.converter.fuse.functions import Fusing, define, rounds_activations
from bf16kit.converter.graph.initializers import only_reader
from bf16kit.runtime.ort.kernel import DOMAIN

_LEAST = 16  # channels on both sides of the first and last convolution: then they pay, too, because of the cache


def bottlenecks(convolutions: Iterable[Convolution]) -> Iterator[tuple[Convolution, Convolution, Convolution]]:
    """Yield each three of ``convolutions`` that the kernel computes in one node: nothing else reads the wide images.

    Without activations, the last of one could be the first of the next: it is yielded once.
    """
    taken = set[ir.Node]()
    among: dict[ir.Node | None, Convolution] = {each.node: each for each in convolutions}
    for first in among.values():
        depthwise = among.get(_reader(first.node))
        last = None if depthwise is None else among.get(_reader(depthwise.node))
        if depthwise is None or not depthwise.depthwise or last is None or not (_mixes(first) and _mixes(last)):
            continue
        three = first, depthwise, last
        *inner, outer = (activation(each.node.outputs[0])[0] for each in three)
        apart = taken.isdisjoint(each.node for each in three)
        if apart and len({*inner}) == 1 and {*inner} <= {*ACTIVATIONS} and outer not in ACTIVATIONS[1:]:
            taken.update(each.node for each in three)
            yield three


def _mixes(found: Convolution) -> bool:
    """Whether ``found`` mixes the channels of each pixel by itself."""
    if not found.panelled or found.groups > 1 or min(found.n, found.channels) < _LEAST:
        return False
    windows = found.windows()
    return {*windows["kernel_shape"], *windows["strides"]} == {1} and not any(windows["pads"])


def _reader(node: ir.Node) -> ir.Node | None:
    """Return the only reader of what the Conv ``node`` gives, or its activation; not a Pad, but what reads it."""
    after = activation(node.outputs[0])[1]
    reader = only_reader((node, *after)[-1].outputs[0])
    return only_reader(reader.outputs[0]) if reader is not None and zeros_added(reader) is not None else reader


def join_bottlenecks(fusing: Fusing) -> None:
    """Replace each of ``fusing.blocks`` by one node, which takes the name of the last.

    Two Transposes that cancel out are between the kernel's nodes. Nodes that do not round alike stay.
    """
    made = {node.name: node for node in fusing.graph if node.domain == DOMAIN}
    for names in fusing.blocks:
        fusing.anchor = names[-1]
        nodes = [made[name] for name in names if name in made]
        if len(nodes) == len(names) and rounds_activations(nodes[0].op_type) == rounds_activations(nodes[-1].op_type):
            _join(fusing, *nodes)


def _activated(node: ir.Node) -> str:
    word = node.op_type.rpartition("_")[2]
    return word if word in ACTIVATIONS else ""


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
