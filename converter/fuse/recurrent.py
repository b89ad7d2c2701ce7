"""Replaces LSTM and GRU by bf16kit's CPU kernel, which keeps their weights in bf16.

The kernel reads a weight as it is stored: in one tensor for all directions, as ONNX has it, or in one for each. Torch's
exporter reorders the gates of such tensors by nodes. These are not run: the kernel's node says which order it reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bf16kit.converter.fuse.functions import ROUNDED, Fusing, Fusion, chain, define
from bf16kit.converter.graph.initializers import const, const_dims, is_onnx_operator

_GATES = {"LSTM": "iofc", "GRU": "zrh"}  # in ONNX's order
_ORDERS = frozenset({"iofc", "ifco", "zrh", "rzh"})  # that the kernel reads; the other ones are PyTorch's
_ACTIVATIONS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"]}
# Units below which ONNX Runtime is faster in fp32, as measured: docs/decisions/0087-recurrences-from-bf16-weights.md.
NARROWEST = 256
_OTHERS = frozenset({"clip", "activation_alpha", "activation_beta"})  # attributes that it does not take
_LENGTHS, _PEEPHOLES = 4, 7  # inputs that the kernel does not take

_FLOAT = ir.DataType.FLOAT

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Weights:
    """The stored ``tensors`` of a weight [directions, gates · hidden, columns], and the ``order`` of its gates in them.

    There is one tensor, or one for each direction.
    """

    tensors: tuple[ir.Value, ...]
    order: str


def recur(fusing: Fusing, node: ir.Node) -> Fusion | None:
    """Replace the LSTM or GRU ``node`` by the kernel's; None if the kernel cannot compute it.

    Left out are fewer than :data:`NARROWEST` units, computed weights, lengths for each row, peepholes, clipping, other
    activations, other layouts, and a GRU that resets before its product. The kernel's node keeps the name, and its
    outputs theirs.
    """
    gates = _GATES.get(node.op_type)
    if gates is None or not _plain(node) or node.inputs[0] is None or node.inputs[0].dtype != _FLOAT:
        return None
    w, r = (stored_weights(value, gates) for value in node.inputs[1:3])
    if w is None or r is None or w.order != r.order or len(w.tensors) != len(r.tensors) or w.order not in _ORDERS:
        return None
    tensors = (*w.tensors, *r.tensors)
    if any(tensor.name not in fusing.narrow for tensor in tensors):
        return None
    apart, hidden = len(w.tensors) > 1, const_dims(r.tensors[0])[-1]
    if hidden < NARROWEST:
        return None
    direction, directions = node.attributes.get_string("direction", "forward"), const_directions(node)
    sizes: dict[str, Any] = {"hidden": hidden, "inputs": const_dims(w.tensors[0])[-1], "gates": w.order}
    sizes |= {"direction": direction, "order": [w.order.index(gate) for gate in gates]}
    sizes |= {"blocks": [directions, len(gates), hidden, -1], "stacked": [directions, len(gates) * hidden, -1]}
    inputs = [node.inputs[0], *tensors, *node.inputs[3:4], *node.inputs[5:7]]
    while inputs[-1] is None:
        inputs.pop()
    function = _function(node.op_type, apart, node.name in fusing.rounding, sizes, fusing.opset)
    made = fusing.operator(function, inputs, sizes, node, node.name, outputs=len(function.outputs))
    # Last states that nothing reads have names too: ONNX's shape inference needs all outputs of the function.
    for place, output in enumerate(made.outputs):
        output.name, output.type = fusing.fresh(f"{node.name}/last{place}") if place else "", ir.TensorType(_FLOAT)
    replaced = {old: new for old, new in zip(node.outputs, made.outputs, strict=False) if old.name}
    return fusing.replace("recurrence", node, [node], made, replaced)


def const_directions(node: ir.Node) -> int:
    """Return the number of directions of an LSTM or GRU."""
    return 2 if node.attributes.get_string("direction", "forward") == "bidirectional" else 1


def stored_weights(value: ir.Value | None, gates: str) -> Weights | None:
    """Return what is stored of the weight ``value``, of ``gates`` in this order; None if it is not stored by gates."""
    tensors: list[ir.Value] = []
    rows = _rows(value, tensors)
    if rows is None or rows.ndim != 3 or rows.shape[1] % len(gates) or len(tensors) not in (1, len(rows)):
        return None
    blocks = rows.reshape(len(rows), len(gates), -1)
    units = blocks.shape[2]
    starts = blocks[:, :, 0] // units
    whole = starts[:, :, None] * units + np.arange(units)
    place = starts - np.arange(len(rows))[:, None] * len(gates)  # of a gate in its direction's rows
    total = sum(int(np.prod(const_dims(tensor)[:-1])) for tensor in tensors)
    if not np.array_equal(blocks, whole) or not (place == place[0]).all() or total != rows.size:
        return None
    if sorted(place[0].tolist()) != [*range(len(gates))]:
        return None
    return Weights(tuple(tensors), "".join(gates[index] for index in np.argsort(place[0])))


def _rows(value: ir.Value | None, tensors: list[ir.Value]) -> Rows | None:
    """Return the numbers of the stored rows that ``value`` consists of, [..., 1], counted over all of ``tensors``.

    Initializers that are read for the first time are added to ``tensors``. None if anything but rows is moved.
    """
    node = None if value is None else value.producer()
    if value is None or (node is None and len(const_dims(value)) < 2):
        return None
    if node is None:
        if value not in tensors:
            tensors.append(value)
        shapes = [const_dims(tensor)[:-1] for tensor in tensors]
        first = sum(int(np.prod(shape)) for shape in shapes[: tensors.index(value)])
        shape = shapes[tensors.index(value)]
        return np.arange(first, first + int(np.prod(shape)), dtype=np.int64).reshape(*shape, 1)
    if not is_onnx_operator(node):
        return None
    if node.op_type == "Concat":
        parts = [rows for each in node.inputs if (rows := _rows(each, tensors)) is not None]
        axis = node.attributes["axis"].as_int()
        last = len(parts[0].shape) - 1 if parts else 0
        return np.concatenate(parts, axis) if len(parts) == len(node.inputs) and axis not in (-1, last) else None
    if node.op_type not in ("Slice", "Unsqueeze"):
        return None
    rows, numbers = _rows(node.inputs[0], tensors), [const(each) for each in node.inputs[1:]]
    if rows is None or any(number is None for number in numbers):
        return None
    lists = [number.numpy().reshape(-1).tolist() for number in numbers if number is not None]
    if node.op_type == "Unsqueeze":
        return rows.reshape(1, *rows.shape) if lists == [[0]] else None
    starts, ends = lists[0], lists[1]
    axes = lists[2] if len(lists) > 2 else [*range(len(starts))]
    if axes not in ([0], [-rows.ndim]) or rows.ndim < 2 or (len(lists) > 3 and lists[3] != [1]):
        return None
    return rows[starts[0] : ends[0]]


def _plain(node: ir.Node) -> bool:
    """Whether the kernel computes what ``node`` asks for."""
    given, directions = node.attributes, const_directions(node)
    if not is_onnx_operator(node) or any(
        node.inputs[place] for place in (_LENGTHS, _PEEPHOLES) if place < len(node.inputs)
    ):
        return False
    activations = [*given.get_strings("activations", ())]
    if activations not in ([], _ACTIVATIONS[node.op_type] * directions) or not given.keys().isdisjoint(_OTHERS):
        return False
    if node.op_type == "GRU" and given.get_int("linear_before_reset", 0) != 1:
        return False
    return given.get_int("layout", 0) == 0 and given.get_int("input_forget", 0) == 0


def _function(op_type: str, apart: bool, rounds: bool, sizes: dict[str, Any], opset: int) -> ir.Function:
    """Return the function X [steps, batch, inputs], the weights W and R as stored, and the node's own B, H and C → Y, …

    It does not round h, as the kernel's operator does that rounds: ONNX's operators have no place for that.
    kernels/ort/recurrent_op.cpp registers them all.
    """
    body = chain("X", "x", *ROUNDED) if rounds else ""
    names = [f"{name}{suffix}" for name in "WR" for suffix in (("1", "2") if apart else ("",))]
    for name in "WR":
        stored = f"{name}1" if apart else name
        if apart:
            body += "".join(chain(f"{name}{i}", f"{name}_{i}_wide", "Cast <to = 1> (#)") for i in "12")
            body += f"{name}_wide = Concat <axis = 0> ({name}_1_wide, {name}_2_wide) "
        else:
            body += chain(stored, f"{name}_wide", "Cast <to = 1> (#)")
        moves = "Reshape (#, blocks)", "Gather <axis = 1> (#, order)", "Reshape (#, stacked)"
        body += chain(f"{name}_wide", f"{name}_onnx", *moves)
    states = ["H", "C"] if op_type == "LSTM" else ["H"]
    outputs = ["Y", *(f"last_{state}" for state in states)]
    reset = "" if op_type == "LSTM" else ", linear_before_reset = 1"
    body += f"{', '.join(outputs)} = {op_type} <hidden_size: int = @hidden, direction: string = @direction{reset}>"
    body += f" ({'x' if rounds else 'X'}, W_onnx, R_onnx, B, , {', '.join(states)})"
    name = f"{op_type}{'2' if apart else ''}{'Bf16' if rounds else ''}"
    return define(name, ["X", *names, "B", *states], outputs, sizes, opset, body)
