"""One fp32 graph in which each rounding to bf16 is switched by an element of an input.

A graph for every plan would mean a session for every plan, and the weights once more in each. Here a value x that bf16
would round is also rounded, by a Cast and one back, and every reader takes ``Where(switch, rounded, x)``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from bf16kit.tensors import TensorSpec
from converter.graph.initializers import initializer
from converter.graph.names import FreshNames, all_value_names, values_of
from converter.graph.operators import EXACT, MERGING, MOVEMENT, SHAPE_ONLY, Bf16Form
from converter.graph.step import Step
from converter.model import Array

FLOAT, BFLOAT16 = ir.DataType.FLOAT, ir.DataType.BFLOAT16
_Use = tuple[ir.Node, int]
_LARGEST = np.float32(3.3895313892515355e38)  # of bf16


@dataclass(frozen=True, slots=True)
class Site:
    """One place where a value may be rounded.

    ``weight`` is the stored tensor that the value is, ``producer`` the node that gives it and rounds what it gives,
    ``reader`` the node that rounds what it reads; "" for each that there is not. ``is_weight``: nodes at most moved
    what a stored tensor holds, to give this value.
    """

    weight: str
    producer: str
    reader: str
    is_weight: bool = False

    def rounds(self, nodes: Collection[str], weights: Collection[str], *, reading_weights: bool = True) -> bool:
        """Whether the value is rounded here when ``nodes`` compute in bf16 and ``weights`` are stored in it.

        With ``reading_weights`` off, nodes are taken to read weights as they are stored.
        """
        reads = self.reader in nodes and (reading_weights or not self.is_weight)
        return self.weight in weights or self.producer in nodes or reads


@dataclass
class Switch(Step):
    """Let every rounding that the nodes in ``forms`` and the tensors ``narrow`` bring about be switched.

    The graph gets an input (``switches``: bool, one element per :class:`Site` in ``sites``, in order) and for each
    output of a node an output that holds its shape (``shapes``, by node name). ``saturated`` names the tensors whose
    overflowing values become the largest finite one. Requires: types are known. Ensures: with all switches off the
    graph computes what it computed before.
    """

    forms: Mapping[str, Bf16Form]
    narrow: Collection[str]
    saturated: Collection[str] = ()
    sites: list[Site] = field(default_factory=list)
    shapes: dict[str, str] = field(default_factory=dict)
    input: str = ""

    name = "switch roundings"

    def __post_init__(self) -> None:
        super().__init__()

    @property
    def spec(self) -> TensorSpec:
        """The input that was added."""
        return TensorSpec(self.input, "bool", (len(self.sites),))

    @property
    def shape_specs(self) -> tuple[TensorSpec, ...]:
        """The outputs that were added."""
        return tuple(TensorSpec(name, "int64", ("rank",)) for name in self.shapes.values())

    def apply(self, model: ir.Model) -> bool:
        graph = model.graph
        fresh = FreshNames(all_value_names(model) | {node.name or "" for node in graph.all_nodes()})
        self.input = fresh.make("switches")
        switches = ir.Value(name=self.input, type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([None]))
        nodes = list(graph)
        for value in [v for v in values_of(graph) if v.dtype == FLOAT and v.name]:
            self._switch(graph, value, switches, fresh)
        for node in nodes:
            self._tell_shape(graph, node, fresh)
        graph.inputs.append(switches)
        return bool(self.sites)

    def _switch(self, graph: ir.Graph, value: ir.Value, switches: ir.Value, fresh: FreshNames) -> None:
        """Let the readers of ``value`` that bf16 would give a rounded one read a switched one."""
        groups: dict[Site, list[_Use]] = {}
        owner, is_weight = self._owner(value), moved_from(value, self.narrow) is not None
        for node, index in value.uses():
            site = Site(*owner, self._reader(node, index), is_weight)
            if any((site.weight, site.producer, site.reader)) and node.op_type not in SHAPE_ONLY:
                groups.setdefault(site, []).append((node, index))
        whole = value.is_graph_output() and any(owner)
        if whole:
            groups.setdefault(Site(*owner, "", is_weight), [])
        if not groups:
            return
        made = _Nodes(graph, value, fresh)
        rounded = made.rounded(clamped=value.name in self.saturated)
        for site, uses in groups.items():
            switched = made.switched(rounded, switches, len(self.sites))
            self.sites.append(site)
            for node, index in uses:
                node.replace_input_with(index, switched)
            if whole and not site.reader:
                _become_output(graph, value, switched, fresh)
        made.insert()

    def _owner(self, value: ir.Value) -> tuple[str, str]:
        """The weight that ``value`` is, and the node that rounds it when it computes it."""
        node = value.producer()
        if node is None:
            return (value.name or "", "") if value.is_initializer() and value.name in self.narrow else ("", "")
        form = self.forms.get(node.name or "")
        rounds = form is not None and value.index() in form.outputs and node.op_type not in EXACT
        return ("", node.name or "") if rounds else ("", "")

    def _reader(self, node: ir.Node, index: int) -> str:
        form = self.forms.get(node.name or "")
        return node.name or "" if form is not None and index in form.inputs else ""

    def _tell_shape(self, graph: ir.Graph, node: ir.Node, fresh: FreshNames) -> None:
        value = next((output for output in node.outputs if output.dtype == FLOAT and output.name), None)
        if value is None:
            return
        shape = ir.node("Shape", [value], name=fresh.make(f"{node.name}/shape"))
        output = shape.outputs[0]
        output.name, output.type, output.shape = shape.name, ir.TensorType(ir.DataType.INT64), ir.Shape([None])
        graph.append(shape)
        graph.outputs.append(output)
        self.shapes[node.name or ""] = output.name or ""


def moved_from(value: ir.Value | None, narrow: Collection[str]) -> str | None:
    """The tensor among ``narrow`` whose elements, and no others, ``value`` holds; None for any other value."""
    while value is not None and (node := value.producer()) is not None:
        if node.op_type not in MOVEMENT or node.op_type in MERGING:
            return None
        value = node.inputs[0]
    return value.name if value is not None and value.is_initializer() and value.name in narrow else None


def positions(
    sites: Sequence[Site], nodes: Collection[str], weights: Collection[str], *, reading_weights: bool = True
) -> Array:
    """What to feed so that exactly ``nodes`` compute in bf16 and ``weights`` are stored in it: see :class:`Site`."""
    return np.array([site.rounds(nodes, weights, reading_weights=reading_weights) for site in sites], np.bool_)


class _Nodes:
    """The nodes made for one value, inserted together behind what gives it."""

    def __init__(self, graph: ir.Graph, value: ir.Value, fresh: FreshNames) -> None:
        self._graph = graph
        self._value = value
        self._fresh = fresh
        self._made: list[ir.Node] = []

    def rounded(self, *, clamped: bool) -> ir.Value:
        value = self._value
        if clamped:
            bounds = [self._constant(-_LARGEST), self._constant(_LARGEST)]
            value = self._add("Clip", [value, *bounds], FLOAT)
        narrow = self._add("Cast", [value], BFLOAT16, to=int(BFLOAT16))
        return self._add("Cast", [narrow], FLOAT, to=int(FLOAT))

    def switched(self, rounded: ir.Value, switches: ir.Value, position: int) -> ir.Value:
        switch = self._add("Gather", [switches, self._constant(np.int64(position))], ir.DataType.BOOL)
        switch.shape = ir.Shape([])
        return self._add("Where", [switch, rounded, self._value], FLOAT)

    def insert(self) -> None:
        producer, first = self._value.producer(), next(iter(self._graph))
        if producer is not None:
            self._graph.insert_after(producer, self._made)
        else:
            self._graph.insert_before(first, self._made)

    def _add(self, op: str, inputs: list[ir.Value], dtype: ir.DataType, **attributes: int) -> ir.Value:
        name = self._fresh.make(f"{self._value.name}/{op.lower()}")
        node = ir.node(op, inputs, attributes=attributes, name=name)
        output = node.outputs[0]
        output.name, output.type, output.shape = name, ir.TensorType(dtype), self._value.shape
        self._made.append(node)
        return output

    def _constant(self, number: np.generic) -> ir.Value:
        name = self._fresh.make(f"{self._value.name}/constant")
        return initializer(self._graph, name, ir.tensor(np.array(number), name=name))


def _become_output(graph: ir.Graph, value: ir.Value, switched: ir.Value, fresh: FreshNames) -> None:
    """Let ``switched`` be the output of ``graph`` that ``value`` was, under its name."""
    for index, output in enumerate(graph.outputs):
        if output is value:
            graph.outputs[index] = switched
    switched.name, value.name = value.name, fresh.make(f"{value.name}/unrounded")
