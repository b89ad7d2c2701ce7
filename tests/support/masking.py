"""Masks as torch's exporter writes them: padding that is looked up at every position, and masks that hide nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

import graphs

Array = NDArray[Any]
HEADS = 3
LOWEST = -3.0e38


@dataclass
class Drawing:
    """A graph under construction. Each node has the name of its output."""

    nodes: list[NodeProto] = field(default_factory=list)
    tensors: dict[str, Array] = field(default_factory=dict)
    named: list[ValueInfoProto] = field(default_factory=list)

    def add(self, op: str, *inputs: str, to: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, [*inputs], [to], name=to, **attributes))
        return to

    def const(self, name: str, value: Any, dtype: Any = np.int64) -> str:
        self.tensors[name] = np.asarray(value, dtype)
        return name

    def positions(self, axis: int, *, start: int = 0, step: int = 1, of: str = "mask", size: str = "seq") -> str:
        """Add a Range: start, start + step, …, as many as ``of`` has along ``axis``, a dimension called ``size``."""
        count = self.add(
            "Squeeze", self.add("Shape", of, to=f"shape{axis}", start=axis, end=axis + 1), to=f"size{axis}"
        )
        first, step_name = self.const(f"start{axis}", start), self.const(f"step{axis}", step)
        end = count
        if (start, step) != (0, 1):
            end = self.add("Add", self.add("Mul", count, step_name, to=f"length{axis}"), first, to=f"end{axis}")
        self.named.append(graphs.edge(f"range{axis}", [size], TensorProto.INT64))
        return self.add("Range", first, end, step_name, to=f"range{axis}")


def looked_up(
    *,
    swapped: bool = False,
    start: int = 0,
    step: int = 1,
    limit: str = "mask",
    batch_dims: int = 0,
    axes: tuple[tuple[int, ...], tuple[int, ...]] = ((1, 2, 3), (0, 1, 2)),
) -> ModelProto:
    """Return the model mask [batch, seq] → y [batch, 1, 1, seq], which looks up each element at its own position.

    ``axes`` are added to the positions in batch and sequence. ``swapped`` concatenates these positions in the other
    order. ``limit`` is the input that determines the number of positions in the sequence.
    """
    d = Drawing()
    rows = d.add("Unsqueeze", d.positions(0, size="batch"), d.const("row_axes", axes[0]), to="rows")
    columns = d.positions(1, start=start, step=step, of=limit, size="seq" if limit == "mask" else "keys")
    columns = d.add("Unsqueeze", columns, d.const("column_axes", axes[1]), to="columns")
    both = d.add("Shape", d.add("Max", rows, columns, to="highest"), to="both")
    parts = [
        d.add("Unsqueeze", d.add("Expand", part, both, to=f"wide_{part}"), d.const("last", [-1]), to=f"at_{part}")
        for part in (rows, columns)
    ]
    indices = d.add("Concat", *(parts[::-1] if swapped else parts), to="indices", axis=-1)
    d.add("GatherND", "mask", indices, to="y", batch_dims=batch_dims)
    return model(d, {"mask": ["batch", "seq"], "other": ["batch", "keys"]}, "y", TensorProto.BOOL)


def hidden(
    truth: str = "range", *, bound: int = 0, start: int = 0, step: int = 1, op: str = "GreaterOrEqual"
) -> ModelProto:
    """Return the model scores [batch, HEADS, seq, seq] and mask [batch, seq] → y = scores + the mask as a number.

    The mask is first And-ed with ``truth``: ``range`` compares positions, ``const`` is a constant, ``fed`` an input.
    """
    d = Drawing()
    pad = d.add("Unsqueeze", "mask", d.const("axes", [1, 2]), to="pad")
    if truth == "range":
        rows = d.positions(1, start=start, step=step)
        rows = d.add("Unsqueeze", rows, d.const("row_axes", [0, 1, 3]), to="rows")
        operands = (rows, d.const("bound", bound))
        holds = d.add(op, *(reversed(operands) if op == "LessOrEqual" else operands), to="holds")
    else:
        holds = d.const("holds", np.ones((1, 1, 1, 1)), np.bool_) if truth == "const" else "fed"
    both = d.add("And", d.const("yes", True, np.bool_), holds, to="both")
    shown = d.add("And", both, pad, to="shown")
    number = d.add("Where", shown, d.const("zero", 0, np.float32), d.const("lowest", LOWEST, np.float32), to="number")
    d.add("Add", "scores", number, to="y")
    shapes: dict[str, list[int | str]] = {"mask": ["batch", "seq"], "scores": ["batch", HEADS, "seq", "seq"]}
    return model(d, shapes | {"fed": ["batch", 1, "seq", 1]}, "y", TensorProto.FLOAT)


def model(d: Drawing, shapes: Mapping[str, list[int | str]], output: str, dtype: int) -> ModelProto:
    """Return the model of ``d`` with the inputs that it reads. Inputs not called ``scores`` are boolean masks."""
    read = {name for node in d.nodes for name in node.input}
    kinds = {name: TensorProto.FLOAT if name == "scores" else TensorProto.BOOL for name in shapes}
    inputs = [graphs.edge(name, shape, kinds[name]) for name, shape in shapes.items() if name in read]
    tensors = [graphs.initializer(name, array) for name, array in d.tensors.items()]
    made = graphs.model(d.nodes, inputs, [graphs.edge(output, dtype=dtype)], tensors)
    made.graph.value_info.extend(d.named)
    return made


def feeds(proto: ModelProto, sizes: Mapping[str, int]) -> dict[str, Array]:
    """Return random values for every input."""
    generator = np.random.default_rng(0)
    found: dict[str, Array] = {}
    for value in proto.graph.input:
        kind = value.type.tensor_type
        shape = [sizes[dim.dim_param] if dim.dim_param else dim.dim_value for dim in kind.shape.dim]
        drawn = generator.standard_normal(shape, np.float32)
        found[value.name] = drawn if kind.elem_type == TensorProto.FLOAT else drawn > 0
    return found
