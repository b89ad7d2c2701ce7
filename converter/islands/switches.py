"""Builds one fp32 graph in which each rounding to bf16 is switched by an element of an input.

One graph per plan would need a session per plan, with its own copy of the weights. Instead, every reader of a value x
that bf16 would round takes ``If(switch, rounded, x)``, where ``rounded`` is a Cast to bf16 and a Cast back. A rounding
that is switched off costs a copy. (``ErrorScope(switch, rounded, x)`` always rounds, and took twice the time of all the
rest.)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from bf16kit.numerics.tensors import TensorSpec
from converter.graph.initializers import initializer
from converter.graph.names import FreshNames, all_value_names, values_of
from converter.graph.operators import EXACT, MERGING, MOVEMENT, SHAPE_ONLY, Bf16Form
from converter.graph.step import Step
from converter.graph.types import is_float_tensor
from converter.source import Array

FLOAT, BFLOAT16 = ir.DataType.FLOAT, ir.DataType.BFLOAT16
_Use = tuple[ir.Node, int]


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

    def rounds(self, bf16: Bf16, *, reading_weights: bool = True) -> bool:
        """Whether the value is rounded here. Without ``reading_weights``, nodes read weights as they are stored."""
        reads = self.reader in bf16.nodes and (reading_weights or not self.is_weight)
        return self.weight in bf16.weights or self.producer in bf16.nodes or reads


@dataclass
class Switch(Step):
    """Make every rounding switchable that the nodes in ``forms`` and the tensors ``narrow`` cause.

    The graph gets an input ``switches`` (bool, one element per :class:`Site` in ``sites``, in order). For each node's
    first named fp32 output it gets an output with the shape (``shapes``, by node name). Requires: types are
    known. Ensures: with all switches off, the graph computes what it computed before.
    """

    forms: Mapping[str, Bf16Form]
    narrow: Collection[str]
    sites: list[Site] = field(default_factory=list)
    shapes: dict[str, str] = field(default_factory=dict)
    input: str = ""

    name = "switch roundings"

    def __post_init__(self) -> None:
        super().__init__()

    @property
    def spec(self) -> TensorSpec:
        """The spec of the added input."""
        return TensorSpec(self.input, "bool", (len(self.sites),))

    @property
    def shape_specs(self) -> tuple[TensorSpec, ...]:
        """The specs of the added outputs."""
        return tuple(TensorSpec(name, "int64", ("rank",)) for name in self.shapes.values())

    def apply(self, model: ir.Model) -> bool:
        graph = model.graph
        fresh = FreshNames(all_value_names(model) | {node.name or "" for node in graph.all_nodes()})
        self.input = fresh.make("switches")
        switches = _value(self.input, ir.DataType.BOOL, ir.Shape([None]))
        nodes = list(graph)
        elements: list[ir.Value] = []
        for value in [v for v in values_of(graph) if is_float_tensor(v)]:
            self._switch(graph, value, elements, fresh)
        _split(graph, switches, elements, fresh)
        for node in nodes:
            self._output_shape(graph, node, fresh)
        graph.inputs.append(switches)
        return bool(self.sites)

    def _switch(self, graph: ir.Graph, value: ir.Value, switches: list[ir.Value], fresh: FreshNames) -> None:
        """Make the readers of ``value`` for which bf16 would round it read a switched value."""
        groups: dict[Site, list[_Use]] = {}
        owner, is_weight = self._owner(value), moved_from(value, self.narrow) is not None
        for node, index in value.uses():
            site = Site(*owner, self._reader(node, index), is_weight)
            if any((site.weight, site.producer, site.reader)) and node.op_type not in SHAPE_ONLY:
                groups.setdefault(site, []).append((node, index))
        replaces_output = value.is_graph_output() and any(owner)
        if replaces_output:
            groups.setdefault(Site(*owner, "", is_weight), [])
        made: list[ir.Node] = []
        for site, uses in groups.items():
            switches.append(_value(fresh.make(f"{value.name}/switch"), ir.DataType.BOOL, ir.Shape([1])))
            made.append(_switched(value, switches[-1], fresh))
            switched = made[-1].outputs[0]
            self.sites.append(site)
            for node, index in uses:
                node.replace_input_with(index, switched)
            if replaces_output and not site.reader:
                _replace_output(graph, value, switched, fresh)
        if (producer := value.producer()) is not None:
            graph.insert_after(producer, made)
        elif made:
            graph.insert_before(next(iter(graph)), made)

    def _owner(self, value: ir.Value) -> tuple[str, str]:
        """Return the stored weight that ``value`` is, and the node that computes and rounds it; "" for each if none."""
        node = value.producer()
        if node is None:
            return (value.name or "", "") if value.is_initializer() and value.name in self.narrow else ("", "")
        form = self.forms.get(node.name or "")
        rounds = form is not None and value.index() in form.outputs and node.op_type not in EXACT
        return ("", node.name or "") if rounds else ("", "")

    def _reader(self, node: ir.Node, index: int) -> str:
        form = self.forms.get(node.name or "")
        return node.name or "" if form is not None and index in form.inputs else ""

    def _output_shape(self, graph: ir.Graph, node: ir.Node, fresh: FreshNames) -> None:
        value = next(filter(is_float_tensor, node.outputs), None)
        if value is None:
            return
        shape = ir.node("Shape", [value], name=fresh.make(f"{node.name}/shape"))
        output = shape.outputs[0]
        output.name, output.type, output.shape = shape.name, ir.TensorType(ir.DataType.INT64), ir.Shape([None])
        graph.append(shape)
        graph.outputs.append(output)
        self.shapes[node.name or ""] = output.name or ""


def moved_from(value: ir.Value | None, narrow: Collection[str]) -> str | None:
    """Return the tensor in ``narrow`` whose elements ``value`` holds, unchanged or moved; None if there is none."""
    while value is not None and (node := value.producer()) is not None:
        if node.op_type not in MOVEMENT or node.op_type in MERGING:
            return None
        value = node.inputs[0]
    return value.name if value is not None and value.is_initializer() and value.name in narrow else None


def positions(sites: Sequence[Site], bf16: Bf16, *, reading_weights: bool = True) -> Array:
    """Return the switches to feed so that exactly ``bf16`` is rounded; see :meth:`Site.rounds`."""
    return np.array([site.rounds(bf16, reading_weights=reading_weights) for site in sites], np.bool_)


def _switched(value: ir.Value, switch: ir.Value, fresh: FreshNames) -> ir.Node:
    """Return an If that gives ``value``, rounded if ``switch`` is on."""

    def node(op: str, *inputs: ir.Value, dtype: ir.DataType = FLOAT, **attributes: int | ir.Graph) -> ir.Node:
        name = fresh.make(f"{value.name}/{op.lower()}")
        return ir.node(op, inputs, attributes, outputs=[_value(name, dtype, value.shape)], name=name)

    def body(name: str, *nodes: ir.Node) -> ir.Graph:
        return ir.Graph([], [nodes[-1].outputs[0]], nodes=nodes, name=fresh.make(f"{value.name}/{name}"))

    narrow = node("Cast", value, dtype=BFLOAT16, to=int(BFLOAT16))
    rounded = body("rounded", narrow, node("Cast", narrow.outputs[0], to=int(FLOAT)))
    return node("If", switch, then_branch=rounded, else_branch=body("kept", node("Identity", value)))


def _value(name: str, dtype: ir.DataType, shape: ir.Shape | None) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=shape)


def _split(graph: ir.Graph, switches: ir.Value, elements: Sequence[ir.Value], fresh: FreshNames) -> None:
    """Make each of ``elements`` one element of ``switches``, in order, by one Split: Gathers took as long as Conv."""
    if elements:
        name = fresh.make("switches/sizes")
        sizes = initializer(graph, name, ir.tensor(np.ones(len(elements), np.int64), name=name))
        node = ir.Node("", "Split", [switches, sizes], outputs=elements, name=fresh.make("switches/split"))
        graph.insert_before(next(iter(graph)), node)


def _replace_output(graph: ir.Graph, value: ir.Value, switched: ir.Value, fresh: FreshNames) -> None:
    """Make ``switched`` the output of ``graph`` in place of ``value``, under the same name."""
    for index, output in enumerate(graph.outputs):
        if output is value:
            graph.outputs[index] = switched
    switched.name, value.name = value.name, fresh.make(f"{value.name}/unrounded")
