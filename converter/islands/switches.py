"""Builds one fp32 graph in which each rounding to bf16 is switched by an element of an input.

One graph per plan would need a session per plan, with its own copy of the weights. Instead, every reader of a value x
that bf16 would round takes ``If(switch, rounded, x)``, where ``rounded`` is a Cast to bf16 and a Cast back. A rounding
that is switched off costs a copy. (``ErrorScope(switch, rounded, x)`` always rounds, and took twice the time of all the
rest.)

The graph also returns the shapes of results, by which each node's share of the arithmetic is known.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from bf16kit.converter.graph.initializers import const, dims, initializer
from bf16kit.converter.graph.names import FreshNames, all_value_names, values_of
from bf16kit.converter.graph.operators import EXACT, MERGING, MOVEMENT, SHAPE_ONLY, bf16_form
from bf16kit.converter.graph.types import is_float_tensor
from bf16kit.converter.source import Array
from bf16kit.numerics.tensors import TensorSpec

FLOAT, BFLOAT16, BOOL, INT64 = ir.DataType.FLOAT, ir.DataType.BFLOAT16, ir.DataType.BOOL, ir.DataType.INT64

Shape = tuple[int, ...]
Shares = Mapping[str, float]  # by name; together 1
_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


@dataclass(frozen=True, slots=True)
class Bf16:
    """The bf16 parts of a profile: the nodes that compute in bf16, and the weights stored in it."""

    nodes: frozenset[str] = frozenset()
    weights: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Site:
    """One place where a value may be rounded.

    ``weight`` is the stored tensor, if the value is one. ``producer`` is the node that computes the value and rounds
    its result. ``reader`` is the node that rounds what it reads. Each is "" if there is none. ``is_weight`` is true if
    the value holds the elements of a stored tensor, at most moved by nodes.
    """

    weight: str
    producer: str
    reader: str
    is_weight: bool = False

    def rounds(self, bf16: Bf16, reading_weights: bool) -> bool:
        """Whether the value is rounded here. Without ``reading_weights``, nodes read weights as they are stored."""
        reads = self.reader in bf16.nodes and (reading_weights or not self.is_weight)
        return self.weight in bf16.weights or self.producer in bf16.nodes or reads


class Switched:
    """A copy of ``base`` in which every rounding that ``bf16`` causes is switched.

    The ``model`` gets an input (``spec``: bool, one element per :class:`Site` in ``sites``, in order). For each node's
    first named fp32 output it gets an output with the shape (``shapes``, by node name). Requires: types are known.
    Ensures: with all switches off, the graph computes what it computed before.
    """

    def __init__(self, base: ir.Model, bf16: Bf16) -> None:
        self.model, opset = base.clone(), base.opset_imports[""]
        self.sites: list[Site] = []
        self.shapes: dict[str, str] = {}
        self._graph, self._narrow = self.model.graph, bf16.weights
        forms = ((node.name, bf16_form(node, opset)) for node in base.graph if node.name in bf16.nodes)
        self._forms = {name: form for name, form in forms if name and form}
        self._fresh = FreshNames(all_value_names(self.model) | {node.name or "" for node in self._graph.all_nodes()})
        name, nodes = self._fresh.make("switches"), list(self._graph)
        switches = [
            each for value in values_of(self._graph) if is_float_tensor(value) for each in self._switch_readers(value)
        ]
        self._graph.inputs.append(_value(name, BOOL, ir.Shape([None])))
        if switches:  # by one Split: Gathers took as long as Conv
            sizes = self._fresh.make("switches/sizes")
            ones = initializer(self._graph, sizes, ir.tensor(np.ones(len(switches), np.int64), name=sizes))
            split = ir.Node("", "Split", [self._graph.inputs[-1], ones], outputs=switches, name=f"{sizes}/split")
            self._graph.insert_before(next(iter(self._graph)), split)
        for node in nodes:
            self._output_shape(node)
        self.spec = TensorSpec(name, "bool", (len(self.sites),))

    @property
    def shape_specs(self) -> tuple[TensorSpec, ...]:
        """The specs of the added outputs."""
        return tuple(TensorSpec(name, "int64", ("rank",)) for name in self.shapes.values())

    def positions(self, bf16: Bf16, *, reading_weights: bool = True) -> Array:
        """Return the switches to feed so that exactly ``bf16`` is rounded; see :meth:`Site.rounds`."""
        return np.array([site.rounds(bf16, reading_weights) for site in self.sites], np.bool_)

    def _switch_readers(self, value: ir.Value) -> list[ir.Value]:
        """Make the readers of ``value`` for which bf16 would round it read a switched value; return the switches."""
        groups: dict[Site, list[tuple[ir.Node, int]]] = {}
        owner, is_weight = self._owner(value), moved_from(value, self._narrow) is not None
        for node, index in value.uses():
            form = self._forms.get(node.name or "")
            reader = node.name or "" if form is not None and index in form.inputs else ""
            if any((*owner, reader)) and node.op_type not in SHAPE_ONLY:
                groups.setdefault(Site(*owner, reader, is_weight), []).append((node, index))
        replaces_output = value.is_graph_output() and any(owner)
        if replaces_output:
            groups.setdefault(Site(*owner, "", is_weight), [])
        switches, made = [], []
        for site, uses in groups.items():
            switches.append(_value(self._fresh.make(f"{value.name}/switch"), BOOL, ir.Shape([1])))
            made.append(self._switched(value, switches[-1]))
            switched = made[-1].outputs[0]
            for node, index in uses:
                node.replace_input_with(index, switched)
            if replaces_output and not site.reader:
                self._replace_output(value, switched)
        self.sites += groups
        if (producer := value.producer()) is not None:
            self._graph.insert_after(producer, made)
        elif made:
            self._graph.insert_before(next(iter(self._graph)), made)
        return switches

    def _replace_output(self, value: ir.Value, switched: ir.Value) -> None:
        """Make ``switched`` the output of the graph in place of ``value``, under the same name."""
        for index, output in enumerate(self._graph.outputs):
            if output is value:
                self._graph.outputs[index] = switched
        switched.name, value.name = value.name, self._fresh.make(f"{value.name}/unrounded")

    def _owner(self, value: ir.Value) -> tuple[str, str]:
        """Return the stored weight that ``value`` is, and the node that computes and rounds it; "" for each if none."""
        node = value.producer()
        if node is None:
            return (value.name or "", "") if value.is_initializer() and value.name in self._narrow else ("", "")
        form = self._forms.get(node.name or "")
        rounds = form is not None and value.index() in form.outputs and node.op_type not in EXACT
        return ("", node.name or "") if rounds else ("", "")

    def _switched(self, value: ir.Value, switch: ir.Value) -> ir.Node:
        """Return an If that gives ``value``, rounded if ``switch`` is on."""

        def node(op: str, *inputs: ir.Value, dtype: ir.DataType = FLOAT, **attributes: int | ir.Graph) -> ir.Node:
            name = self._fresh.make(f"{value.name}/{op.lower()}")
            return ir.node(op, inputs, attributes, outputs=[_value(name, dtype, value.shape)], name=name)

        def body(name: str, *nodes: ir.Node) -> ir.Graph:
            return ir.Graph([], [nodes[-1].outputs[0]], nodes=nodes, name=self._fresh.make(f"{value.name}/{name}"))

        narrow = node("Cast", value, dtype=BFLOAT16, to=int(BFLOAT16))
        rounded = body("rounded", narrow, node("Cast", narrow.outputs[0], to=int(FLOAT)))
        return node("If", switch, then_branch=rounded, else_branch=body("kept", node("Identity", value)))

    def _output_shape(self, node: ir.Node) -> None:
        value = next(filter(is_float_tensor, node.outputs), None)
        if value is not None:
            name = self._fresh.make(f"{node.name}/shape")
            shape = ir.node("Shape", [value], outputs=[_value(name, INT64, ir.Shape([None]))], name=name)
            self._graph.append(shape)
            self._graph.outputs.append(shape.outputs[0])
            self.shapes[node.name or ""] = name


def moved_from(value: ir.Value | None, narrow: Collection[str]) -> str | None:
    """Return the tensor in ``narrow`` whose elements ``value`` holds, unchanged or moved; None if there is none."""
    while value is not None and (node := value.producer()) is not None:
        if node.op_type not in MOVEMENT or node.op_type in MERGING:
            return None
        value = node.inputs[0]
    return value.name if value is not None and value.is_initializer() and value.name in narrow else None


def _value(name: str, dtype: ir.DataType, shape: ir.Shape | None) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=shape)


# --- what nodes and weights cost --------------------------------------------------------------------------------------


def flop_shares(model: ir.Model, shapes: Mapping[str, Shape]) -> Shares:
    """Return the share of each node of the main graph in its arithmetic, in floating-point operations.

    ``shapes`` are those of each node's first fp32 output when one sample was run. A product counts two per
    multiply-add, and any other node that computes floats one per element.
    """
    nodes = {node.name or "": node for node in model.graph}
    return _shares({name: math.prod(shape) * _per_element(nodes[name], shapes) for name, shape in shapes.items()})


def byte_shares(model: ir.Model, weights: Collection[str]) -> Shares:
    """Return the share of each of ``weights`` in the bytes of all."""
    stored = {name: value.const_value for name, value in model.graph.initializers.items() if name in weights}
    return _shares({name: tensor.nbytes for name, tensor in stored.items() if tensor is not None})


def share(shares: Shares, names: Iterable[str]) -> float:
    """Return the share of ``names`` together; fsum makes it independent of a set's order."""
    return math.fsum(shares.get(name, 0.0) for name in names)


def _per_element(node: ir.Node, shapes: Mapping[str, Shape]) -> int:
    op = node.op_type if node.domain in ("", "com.microsoft") else ""  # others may have the names, but other inputs
    first, second, third = (_shape(value, shapes) for value in (*node.inputs, None, None, None)[:3])
    if op in ("MatMul", "Gemm", "FusedMatMul"):
        return 2 * (first[0 if node.attributes.get_int("transA", 0) else -1] if first else 1)
    if op == "Conv":
        return 2 * math.prod(second[1:])
    if op == "ConvTranspose":
        return 2 * math.prod(second[2:]) * second[0]
    if op in _GATES:
        return 2 * _GATES[op] * sum((*second[-1:], *third[-1:]))
    return 1


def _shape(value: ir.Value | None, shapes: Mapping[str, Shape]) -> Shape:
    """Return the shape as far as it is known, with 1 for each unknown dimension."""
    if value is None:
        return ()
    tensor, producer = const(value), value.producer()
    if tensor is not None:
        return dims(tensor)
    if producer is not None and producer.outputs[0] is value and (producer.name or "") in shapes:
        return shapes[producer.name or ""]
    return () if value.shape is None else tuple(d if isinstance(d, int) else 1 for d in value.shape)


def _shares(amounts: Mapping[str, int]) -> Shares:
    total = sum(amounts.values())
    return {name: amount / total if total else 0.0 for name, amount in amounts.items()}
