"""Puts weights that are stored in panels together again, for graphs that read matrices."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from bf16kit.artifact.manifest import TensorEntry
from bf16kit.messages.errors import ConversionError
from bf16kit.numerics.panels import WIDTH
from converter.graph.initializers import initializer
from converter.graph.names import FreshNames, all_value_names
from converter.graph.step import Step

BFLOAT16 = ir.DataType.BFLOAT16
PUT_TOGETHER = frozenset({"Concat", "Reshape", "Transpose"})  # the operators that put panels together
_SIZE = 2  # bytes of a bfloat16


class Unpanel(Step):
    """Make every reader of a matrix that is stored in panels read the matrix put together from them.

    The initializer becomes the panels as the file holds them, ``[P, K, 32]``. A narrower last panel becomes an
    initializer of its own, ``[K, N mod 32]``, of the bytes after them. A Transpose, a Reshape and, with a narrower
    panel, a Concat compute the matrix. They only move constants, so ONNX Runtime runs them once, at load. The file's
    bytes are declared in their own shape. A flat tensor would need a Split and a Reshape, which each copy every weight.

    ``stored`` says how each tensor is stored. Afterwards ``declared`` holds the external tensors to write, by
    initializer name. Initializers that are no matrices, because something reads the panels themselves, stay as they
    are.

    Requires: matrices stored in panels have their logical shape, and bf16. Ensures: none of them is read as a matrix.
    """

    name = "put panels together"

    def __init__(self, stored: Mapping[str, TensorEntry]) -> None:
        super().__init__()
        self._panelled = {name: entry for name, entry in stored.items() if entry.panels is not None}
        self.declared: dict[str, ir.ExternalTensor] = {}

    def requires(self, model: ir.Model) -> None:
        for value, entry in self._matrices(model):
            if value.dtype != BFLOAT16 or value.shape != entry.shape:
                raise ConversionError(
                    f"initializer {value.name!r} is {value.dtype}{value.shape}, stored are panels of bf16{entry.shape}"
                )

    def apply(self, model: ir.Model) -> bool:
        self.declared.clear()
        matrices = self._matrices(model)
        if not matrices:
            return False
        nodes = _Nodes(model)
        for value, entry in matrices:
            readers = tuple(value.uses())
            matrix = self._matrix(value, entry, nodes)
            for use in readers:
                use.node.replace_input_with(use.idx, matrix)
        model.graph.insert_before(model.graph[0], nodes.made)
        return True

    def ensures(self, model: ir.Model) -> None:
        for value, entry in self._matrices(model):
            if value.name not in self.declared:
                raise ConversionError(f"initializer {value.name!r} is read as {entry.shape}, and stored as panels")

    def _matrices(self, model: ir.Model) -> list[tuple[ir.Value, TensorEntry]]:
        found = [(value, self._panelled.get(name)) for name, value in model.graph.initializers.items()]
        return [(v, e) for v, e in found if e is not None and v.shape is not None and len(v.shape) == 2 and v.uses()]

    def _matrix(self, value: ir.Value, entry: TensorEntry, nodes: _Nodes) -> ir.Value:
        """Return the matrix of ``entry``, computed from ``value``, which becomes the panels as the file holds them."""
        columns_first = entry.panels == 0  # [N, K]: a panel holds [w, K] transposed
        k, n = entry.shape[::-1] if columns_first else entry.shape
        count, tail = divmod(n, WIDTH)
        if count == 0:
            _set_tensor(value, self._part(value.name or "", entry, 0, (k, tail)))
            return nodes.add("Transpose", [value], entry.shape, perm=[1, 0]) if columns_first else value
        _set_tensor(value, self._part(value.name or "", entry, 0, (count, k, WIDTH)))
        if columns_first:
            moved = nodes.add("Transpose", [value], (count, WIDTH, k), perm=[0, 2, 1])
            whole = nodes.reshape(moved, (count * WIDTH, k))
        else:
            moved = nodes.add("Transpose", [value], (k, count, WIDTH), perm=[1, 0, 2])
            whole = nodes.reshape(moved, (k, count * WIDTH))
        if tail == 0:
            return whole
        name = nodes.fresh(f"{value.name}/last")
        last = nodes.initializer(name, self._part(name, entry, count * k * WIDTH, (k, tail)))
        if columns_first:
            last = nodes.add("Transpose", [last], (tail, k), perm=[1, 0])
        return nodes.add("Concat", [whole, last], entry.shape, axis=entry.panels)

    def _part(self, name: str, entry: TensorEntry, first: int, shape: Sequence[int]) -> ir.ExternalTensor:
        """Return the elements of ``entry`` from ``first`` on, as its file holds them, declared to have ``shape``."""
        offset, length = entry.offset + _SIZE * first, _SIZE * math.prod(shape)
        part = ir.ExternalTensor(entry.file, offset, length, BFLOAT16, shape=ir.Shape(shape), name=name)
        self.declared[name] = part
        return part


def _set_tensor(initializer: ir.Value, tensor: ir.ExternalTensor) -> None:
    initializer.const_value, initializer.type, initializer.shape = tensor, ir.TensorType(BFLOAT16), tensor.shape


class _Nodes:
    """New nodes of a graph, each with a name, type and shape, in the order of computation."""

    def __init__(self, model: ir.Model) -> None:
        self.made: list[ir.Node] = []
        self._graph = model.graph
        self._fresh = FreshNames(all_value_names(model) | {node.name or "" for node in model.graph.all_nodes()})
        self._shapes: dict[tuple[int, ...], ir.Value] = {}

    def add(self, op: str, inputs: Sequence[ir.Value], shape: Sequence[int], **attributes: Any) -> ir.Value:
        """Add a node and return its output, bf16 of ``shape``."""
        name = self.fresh(f"{inputs[0].name}/{op.lower()}")
        node = ir.node(op, inputs, attributes=attributes, name=name)
        output = node.outputs[0]
        output.name, output.type, output.shape = name, ir.TensorType(BFLOAT16), ir.Shape(shape)
        self.made.append(node)
        return output

    def reshape(self, value: ir.Value, shape: tuple[int, ...]) -> ir.Value:
        """Return ``value`` reshaped to ``shape``; equal shapes share one constant."""
        if shape not in self._shapes:
            name = self.fresh(f"shape/{'x'.join(map(str, shape))}")
            self._shapes[shape] = self.initializer(name, ir.tensor(np.array(shape, np.int64), name=name))
        return self.add("Reshape", [value, self._shapes[shape]], shape)

    def initializer(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        return initializer(self._graph, name, tensor)

    def fresh(self, name: str) -> str:
        return self._fresh.make(name)


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
