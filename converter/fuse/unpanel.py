"""Puts weights that are stored in panels together again, for graphs that read matrices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from bf16kit.artifact.manifest import TensorEntry
from bf16kit.numerics.panels import WIDTH
from converter.graph.initializers import initializer
from converter.graph.names import FreshNames, all_value_names
from converter.graph.types import Step

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

    Requires: matrices stored in panels have their logical shape, and bf16.
    """

    name = "put panels together"

    def __init__(self, stored: Mapping[str, TensorEntry]) -> None:
        super().__init__()
        self._panelled = {name: entry for name, entry in stored.items() if entry.panels is not None}
        self.declared: dict[str, ir.ExternalTensor] = {}

    def apply(self, model: ir.Model) -> bool:
        self.declared.clear()
        found = [(value, self._panelled.get(name)) for name, value in model.graph.initializers.items()]
        matrices = [
            (v, e) for v, e in found if e is not None and v.shape is not None and len(v.shape) == 2 and v.uses()
        ]
        if not matrices:
            return False
        nodes = _Nodes(model)
        for value, entry in matrices:
            readers = tuple(value.uses())
            matrix = self._matrix(value, entry, nodes)
            for use in readers:
                use.node.replace_input_with(use.idx, matrix)
        return True

    def _matrix(self, value: ir.Value, entry: TensorEntry, nodes: _Nodes) -> ir.Value:
        """Return the matrix of ``entry``, computed from ``value``, which becomes the panels as the file holds them."""
        columns_first = entry.panels == 0  # [N, K]: a panel holds [w, K] transposed
        k, n = entry.shape[::-1] if columns_first else entry.shape
        count, tail = divmod(n, WIDTH)
        own = (count, k, WIDTH) if count else (k, tail)
        value.const_value = self._part(value.name or "", entry, 0, own)
        value.shape = ir.Shape(own)
        if count == 0:
            return nodes.add("Transpose", [value], entry.shape, perm=[1, 0]) if columns_first else value
        if columns_first:
            moved = nodes.add("Transpose", [value], (count, WIDTH, k), perm=[0, 2, 1])
            whole = nodes.reshape(moved, (count * WIDTH, k))
        else:
            moved = nodes.add("Transpose", [value], (k, count, WIDTH), perm=[1, 0, 2])
            whole = nodes.reshape(moved, (k, count * WIDTH))
        if tail == 0:
            return whole
        name = nodes.fresh.make(f"{value.name}/last")
        last = initializer(nodes.graph, name, self._part(name, entry, count * k * WIDTH, (k, tail)))
        if columns_first:
            last = nodes.add("Transpose", [last], (tail, k), perm=[1, 0])
        return nodes.add("Concat", [whole, last], entry.shape, axis=entry.panels)

    def _part(self, name: str, entry: TensorEntry, first: int, shape: Sequence[int]) -> ir.ExternalTensor:
        """Return the elements of ``entry`` from ``first`` on, as its file holds them, declared to have ``shape``."""
        offset, length = entry.offset + _SIZE * first, _SIZE * math.prod(shape)
        part = ir.ExternalTensor(entry.file, offset, length, BFLOAT16, shape=ir.Shape(shape), name=name)
        self.declared[name] = part
        return part


class _Nodes:
    """New nodes at the beginning of a graph, each with a name, type and shape, in the order of computation."""

    def __init__(self, model: ir.Model) -> None:
        self.graph, self._first = model.graph, model.graph[0]
        self.fresh = FreshNames(all_value_names(model) | {node.name or "" for node in model.graph.all_nodes()})
        self._shapes: dict[tuple[int, ...], ir.Value] = {}

    def add(self, op: str, inputs: Sequence[ir.Value], shape: Sequence[int], **attributes: Any) -> ir.Value:
        """Add a node and return its output, bf16 of ``shape``."""
        name = self.fresh.make(f"{inputs[0].name}/{op.lower()}")
        output = ir.Value(name=name, type=ir.TensorType(BFLOAT16), shape=ir.Shape(shape))
        self.graph.insert_before(self._first, ir.node(op, inputs, attributes, outputs=[output], name=name))
        return output

    def reshape(self, value: ir.Value, shape: tuple[int, ...]) -> ir.Value:
        """Return ``value`` reshaped to ``shape``; equal shapes share one constant."""
        if shape not in self._shapes:
            name = self.fresh.make(f"shape/{'x'.join(map(str, shape))}")
            self._shapes[shape] = initializer(self.graph, name, ir.tensor(np.array(shape, np.int64), name=name))
        return self.add("Reshape", [value, self._shapes[shape]], shape)
